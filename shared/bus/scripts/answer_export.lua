#!lua flags=allow-oom
-- Answer an export order, unless it is gone or taken by another.
-- KEYS: exports
-- ARGV: number taker answer
-- Returns 1, or 0 if nothing was done.
if redis.call('HGET', exports, number .. ':taker') ~= taker then
  return 0
end
redis.call('HSET', exports, number .. ':answer', answer)
return 1
