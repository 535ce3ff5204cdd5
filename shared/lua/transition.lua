-- Transition: change the run's state if it is one of those allowed, and write down why.
-- KEYS run        ARGV new state, reason, now, allowed states...
-- Returns {1 or 0, the state it found}.
local found = redis.call('HGET', KEYS[1], 'state') or ''
for i = 4, #ARGV do
  if found == ARGV[i] then
    redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2], 'changed_at_s', ARGV[3])
    return {1, found}
  end
end
return {0, found}
