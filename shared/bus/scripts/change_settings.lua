#!lua flags=allow-oom
-- Change settings: write the next revision, with the step at which it was asked for, if nobody else did meanwhile.
-- KEYS: live run
-- ARGV: expected revision
-- `expected` is the number of the revision before it, `revision` the next one as JSON.
-- Returns 1, also when this very revision was written before (its answer was lost); 0 when another one was.
local found = tonumber(redis.call('HGET', live, 'revision') or '0')
local following = string.format('%d', tonumber(expected) + 1)
if found ~= tonumber(expected) then
  return redis.call('HGET', live, following) == revision and 1 or 0
end
redis.call('HSET', live, 'revision', following, following, revision,
  'step:' .. following, redis.call('HGET', run, 'step') or '0')
return 1
