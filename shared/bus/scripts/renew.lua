#!lua flags=allow-oom
-- Renew: say that these entries are still being worked on, where they are still ours.
-- KEYS stream        ARGV group, consumer, entry ids...
-- Returns the ids that are still ours; the others were taken over or finished by somebody else, or the server came back empty.
local ours = {}
for i = 3, #ARGV do
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)
  if not pending.err and pending[1] and pending[1][2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    ours[#ours + 1] = ARGV[i]
  end
end
return ours
