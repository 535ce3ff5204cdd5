#!lua flags=allow-oom
-- Leave the lease, so that another coordinator leads at once.
-- KEYS: lease
-- ARGV: process
-- Returns 1, or 0 when another holds it.
if redis.call('HGET', lease, 'process') ~= process then
  return 0
end
redis.call('DEL', lease)
return 1
