#!lua flags=allow-oom
-- Renew the entries that are still ours.
-- KEYS: stream
-- ARGV: group consumer entries...
-- Returns their ids; the others were taken over or finished, or the server lost its data.
local ours = {}
for _, entry in ipairs(entries) do
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  if not pending.err and pending[1] and pending[1][2] == consumer then
    redis.call('XCLAIM', stream, group, consumer, 0, entry, 'JUSTID')
    ours[#ours + 1] = entry
  end
end
return ours
