#!lua flags=allow-oom
-- Register: keep the settings of a new run, in state `created`; or do nothing when a run of this id is there.
-- KEYS: settings run
-- ARGV: text now_s
-- Returns 1, also when the same settings were registered before and the run has not begun; 0 when another run has the id.
local known = redis.call('GET', settings)
if known then
  return known == text and 1 or 0
end
if redis.call('EXISTS', run) == 1 then
  return 0
end
redis.call('SET', settings, text)
redis.call('HSET', run, 'state', 'created', 'created_at_s', now_s)
return 1
