-- Lease: take or renew the right to lead. Whoever takes it gets the next term, a number that only grows: what a leader writes
-- under an older term is refused.
-- KEYS lease, run        ARGV holder, milliseconds
-- Returns {the holder's term, or 0 when another holds it; the holder; milliseconds that are left}.
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder and holder ~= ARGV[1] then
  return {0, holder, redis.call('PTTL', KEYS[1])}
end
if not holder then
  local term = redis.call('HINCRBY', KEYS[2], 'leader_term', 1)
  redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'term', term)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {tonumber(redis.call('HGET', KEYS[1], 'term')), ARGV[1], tonumber(ARGV[2])}
