#!lua flags=no-writes
-- Count the entries that a consumer holds or can take at once: new ones, and those that were given back.
-- KEYS: stream
-- ARGV: group consumer given_back
local within_reach = redis.call('XLEN', stream)
local summary = redis.pcall('XPENDING', stream, group)
for _, row in ipairs(not summary.err and summary[4] or {}) do
  if row[1] ~= consumer and row[1] ~= given_back then
    within_reach = within_reach - tonumber(row[2])
  end
end
return within_reach
