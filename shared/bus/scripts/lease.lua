#!lua flags=allow-oom
-- Lease: take or renew the right to lead. Whoever takes it gets the next term, a number that only grows: what a leader writes
-- under an older term is refused. A process that is started again under its replica's name takes it over at once.
-- KEYS lease, run        ARGV replica, process, milliseconds
-- Returns {the term, or 0 when another replica holds it; the replica that holds it}.
local held = redis.call('HMGET', KEYS[1], 'replica', 'process', 'term')
if held[1] and held[1] ~= ARGV[1] then
  return {0, held[1]}
end
local term = held[3]
if held[2] ~= ARGV[2] then
  term = redis.call('HINCRBY', KEYS[2], 'leader_term', 1)
  redis.call('HSET', KEYS[1], 'replica', ARGV[1], 'process', ARGV[2], 'term', term)
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {tonumber(term), ARGV[1]}
