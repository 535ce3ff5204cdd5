#!lua flags=allow-oom
-- Change settings: write the next revision with its step, unless another process did.
-- KEYS: live run
-- ARGV: expected revision
-- `expected`: number of the previous revision; `revision`: the next one as JSON.
-- Returns 1, also if this very revision was already written (its answer was lost); 0 if another was.
local found = tonumber(redis.call('HGET', live, 'revision') or '0')
local following = string.format('%d', tonumber(expected) + 1)
if found ~= tonumber(expected) then
  return redis.call('HGET', live, following) == revision and 1 or 0
end
redis.call('HSET', live, 'revision', following, following, revision,
  'step:' .. following, redis.call('HGET', run, 'step') or '0')
return 1
