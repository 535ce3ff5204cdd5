#!lua flags=allow-oom
-- Release the lease.
-- KEYS: lease
-- ARGV: process
-- Returns 1, or 0 if another holds it.
if redis.call('HGET', lease, 'process') ~= process then
  return 0
end
redis.call('DEL', lease)
return 1
