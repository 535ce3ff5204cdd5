#!lua flags=allow-oom
-- Discard: let a dead letter leave the run for good, counted; or do nothing when it is gone.
-- KEYS dead, counts, audit
-- ARGV entry id, outcome under which it was counted ('': it was not), outcome from now on, detail, audit length
-- Returns 1, or 0 when there is no such dead letter.
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not found then
  return 0
end
redis.call('XDEL', KEYS[1], ARGV[1])
if ARGV[2] ~= '' then
  redis.call('HINCRBY', KEYS[2], ARGV[2], -1)
  redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
  if tonumber(ARGV[5]) > 0 then
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'id', found[2][2], 'outcome', ARGV[3], 'detail', ARGV[4])
  end
end
return 1
