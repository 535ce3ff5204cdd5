#!lua flags=allow-oom
-- Appoint: say which replicas keep the version of the evaluation under way; or do nothing when it is over.
-- KEYS evaluation        ARGV version, holding (JSON)
-- Returns 1, or 0 when nothing was done.
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'holding', ARGV[2])
return 1
