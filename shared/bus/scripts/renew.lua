#!lua flags=allow-oom
-- Renew: say that these entries are still being worked on, where they are still ours.
-- KEYS: stream
-- ARGV: group consumer entries...
-- Returns the ids that are still ours; the others were taken over or finished by somebody else, or the server came back empty.
local ours = {}
for _, entry in ipairs(entries) do
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  if not pending.err and pending[1] and pending[1][2] == consumer then
    redis.call('XCLAIM', stream, group, consumer, 0, entry, 'JUSTID')
    ours[#ours + 1] = entry
  end
end
return ours
