#!lua flags=allow-oom
-- Revive: put a dead letter back where it came from, as if it had never been handled; or do nothing when it is gone.
-- KEYS dead, stream, counts, run        ARGV entry id, outcome under which it was counted ('': it was not)
-- Returns 1; 0 when there is no such dead letter; -1 when the run has ended, where nobody would handle it.
local state = redis.call('HGET', KEYS[4], 'state')
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not found then
  return 0
end
if state == 'stopped' or state == 'finished' then
  return -1
end
local fields = {}
for i = 1, #found[2], 2 do
  fields[found[2][i]] = found[2][i + 1]
end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[2], '*', 'id', fields.id or '', 'data', fields.data or '')
if ARGV[2] ~= '' then
  redis.call('HINCRBY', KEYS[3], ARGV[2], -1)
end
return 1
