#!lua flags=allow-oom
-- Answer an order for an export, unless it is gone or another took it meanwhile.
-- KEYS: exports
-- ARGV: number taker answer
-- Returns 1, or 0 when nobody listens.
if redis.call('HGET', exports, number .. ':taker') ~= taker then
  return 0
end
redis.call('HSET', exports, number .. ':answer', answer)
return 1
