#!lua flags=allow-oom
-- Register: keep the settings of a new run, in state `created`; or do nothing when a run of this id is there.
-- KEYS settings, run        ARGV settings (TOML), now
-- Returns 1, also when the same settings were registered before and the run has not begun; 0 when another run has the id.
local known = redis.call('GET', KEYS[1])
if known then
  return known == ARGV[1] and 1 or 0
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'state', 'created', 'created_at_s', ARGV[2])
return 1
