#!lua flags=allow-oom
-- Take or renew the leader lease. Each new holder gets the next term; writes under an older term are refused. A process
-- restarted under the same replica name takes it over at once.
-- KEYS: lease run
-- ARGV: replica process ttl_ms
-- Returns {the term, or 0 if another replica holds it; the holder}.
local held = redis.call('HMGET', lease, 'replica', 'process', 'term')
if held[1] and held[1] ~= replica then
  return {0, held[1]}
end
local term = held[3]
if held[2] ~= process then
  term = redis.call('HINCRBY', run, 'leader_term', 1)
  redis.call('HSET', lease, 'replica', replica, 'process', process, 'term', term)
end
redis.call('PEXPIRE', lease, ttl_ms)
return {tonumber(term), replica}
