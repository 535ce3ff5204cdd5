#!lua flags=allow-oom
-- Lease: take or renew the right to lead. Whoever takes it gets the next term, a number that only grows: what a leader writes
-- under an older term is refused. A process that is started again under its replica's name takes it over at once.
-- KEYS: lease run
-- ARGV: replica process ttl_ms
-- Returns {the term, or 0 when another replica holds it; the replica that holds it}.
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
