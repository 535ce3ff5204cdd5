#!lua flags=allow-oom
-- Register a new run: keep its settings, in state `created`.
-- KEYS: settings run
-- ARGV: text now_s
-- Returns 1, also if the same settings were registered and the run has not begun; 0 if another run has the id.
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
