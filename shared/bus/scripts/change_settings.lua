#!lua flags=allow-oom
-- Change settings: write the next revision, with the step at which it was asked for, if nobody else did meanwhile.
-- KEYS live, run        ARGV expected revision, the next one (JSON)
-- Returns 1, also when this very revision was written before (its answer was lost); 0 when another one was.
local found = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
local expected = tonumber(ARGV[1])
local following = string.format('%d', expected + 1)
if found ~= expected then
  return redis.call('HGET', KEYS[1], following) == ARGV[2] and 1 or 0
end
redis.call('HSET', KEYS[1], 'revision', following, following, ARGV[2],
  'step:' .. following, redis.call('HGET', KEYS[2], 'step') or '0')
return 1
