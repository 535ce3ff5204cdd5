-- Leave the lease, so that another coordinator leads at once.
-- KEYS lease        ARGV holder
-- Returns 1, or 0 when another holds it.
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
return 1
