#!lua flags=allow-oom
-- Unregister: forget the settings and the state of a registered run, unless it is running or paused.
-- KEYS: settings run
-- Returns 1, or 0 when the run is running or paused.
local state = redis.call('HGET', run, 'state')
if state == 'running' or state == 'paused' then
  return 0
end
redis.call('DEL', settings, run)
return 1
