#!lua flags=allow-oom
-- Leave the lease, so that another coordinator leads at once.
-- KEYS lease        ARGV process
-- Returns 1, or 0 when another holds it.
if redis.call('HGET', KEYS[1], 'process') ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
return 1
