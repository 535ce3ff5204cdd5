#!lua flags=allow-oom
-- Appoint the replicas that keep the version of the current evaluation, unless it is over.
-- KEYS: evaluation holds
-- ARGV: version holding
-- Returns 1, or 0 if nothing was done.
if redis.call('HGET', evaluation, 'version') ~= version then
  return 0
end
redis.call('HSET', evaluation, 'holding', holding)
redis.call('XADD', holds, 'MAXLEN', '~', 16, '*', 'id', version)
return 1
