#!lua flags=allow-oom
-- Take an export order, also from another taker. Taking again under the same name is the same attempt.
-- KEYS: exports
-- ARGV: number taker
-- Returns the attempt's number; 0 if the order is gone.
if redis.call('HEXISTS', exports, number) == 0 then
  return 0
end
if redis.call('HGET', exports, number .. ':taker') == taker then
  return tonumber(redis.call('HGET', exports, number .. ':attempts'))
end
redis.call('HSET', exports, number .. ':taker', taker)
return redis.call('HINCRBY', exports, number .. ':attempts', 1)
