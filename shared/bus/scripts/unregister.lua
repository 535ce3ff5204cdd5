#!lua flags=allow-oom
-- Unregister a run: delete settings and state, unless it is running or paused.
-- KEYS: settings run
-- Returns 1, or 0 if it is running or paused.
local state = redis.call('HGET', run, 'state')
if state == 'running' or state == 'paused' then
  return 0
end
redis.call('DEL', settings, run)
return 1
