#!lua flags=allow-oom
-- Note: what the coordinator that leads says of the run, for every other one to say too.
-- KEYS run        ARGV leader's term or "", field, text
-- Returns 1; 0 when another leads.
if ARGV[1] ~= '' and ARGV[1] ~= (redis.call('HGET', KEYS[1], 'leader_term') or '') then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
return 1
