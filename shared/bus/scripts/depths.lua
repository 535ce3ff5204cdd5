#!lua flags=no-writes
-- Depths of streams.
-- KEYS: streams...
-- ARGV: groups...
-- `groups`: the streams' consumer groups, '' for none.
-- Returns {entries, pending, id of the oldest entry or ''} for each, read at one moment.
local result = {}
for i, stream in ipairs(streams) do
  local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local pending = 0
  if groups[i] ~= '' then
    local summary = redis.pcall('XPENDING', stream, groups[i])
    pending = summary.err and 0 or summary[1]
  end
  result[i] = {redis.call('XLEN', stream), pending, oldest and oldest[1] or ''}
end
return result
