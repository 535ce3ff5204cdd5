#!lua flags=allow-oom
-- Note: what the coordinator that leads says of the run, for every other one to say too.
-- KEYS: run
-- ARGV: term field text
-- `term` is that of the leader, or "".
-- Returns 1; 0 when another leads.
if term ~= '' and term ~= (redis.call('HGET', run, 'leader_term') or '') then
  return 0
end
redis.call('HSET', run, field, text)
return 1
