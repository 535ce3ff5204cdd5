#!lua flags=allow-oom
-- Take an order for an export, from whoever had it. Taking again under the same name is the same attempt.
-- KEYS exports        ARGV number, taker
-- Returns which attempt this is; 0 when the order is gone.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return 0
end
if redis.call('HGET', KEYS[1], ARGV[1] .. ':taker') == ARGV[2] then
  return tonumber(redis.call('HGET', KEYS[1], ARGV[1] .. ':attempts'))
end
redis.call('HSET', KEYS[1], ARGV[1] .. ':taker', ARGV[2])
return redis.call('HINCRBY', KEYS[1], ARGV[1] .. ':attempts', 1)
