#!lua flags=allow-oom
-- Appoint: say which replicas keep the version of the evaluation under way; or do nothing when it is over.
-- KEYS: evaluation
-- ARGV: version holding
-- Returns 1, or 0 when nothing was done.
if redis.call('HGET', evaluation, 'version') ~= version then
  return 0
end
redis.call('HSET', evaluation, 'holding', holding)
return 1
