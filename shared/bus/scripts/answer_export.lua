#!lua flags=allow-oom
-- Answer an order for an export, unless it is gone or another took it meanwhile.
-- KEYS exports        ARGV number, taker, answer
-- Returns 1, or 0 when nobody listens.
if redis.call('HGET', KEYS[1], ARGV[1] .. ':taker') ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1] .. ':answer', ARGV[3])
return 1
