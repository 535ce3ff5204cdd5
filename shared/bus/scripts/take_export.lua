#!lua flags=allow-oom
-- Take an order for an export, from whoever had it. Taking again under the same name is the same attempt.
-- KEYS: exports
-- ARGV: number taker
-- Returns which attempt this is; 0 when the order is gone.
if redis.call('HEXISTS', exports, number) == 0 then
  return 0
end
if redis.call('HGET', exports, number .. ':taker') == taker then
  return tonumber(redis.call('HGET', exports, number .. ':attempts'))
end
redis.call('HSET', exports, number .. ':taker', taker)
return redis.call('HINCRBY', exports, number .. ':attempts', 1)
