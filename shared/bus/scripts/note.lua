#!lua flags=allow-oom
-- Note: publish what the leading coordinator knows.
-- KEYS: run
-- ARGV: term field text
-- `term`: the leader's, or "".
-- Returns 1; 0 if another leads.
if term ~= '' and term ~= (redis.call('HGET', run, 'leader_term') or '') then
  return 0
end
redis.call('HSET', run, field, text)
return 1
