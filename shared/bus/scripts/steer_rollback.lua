#!lua flags=allow-oom
-- Steer a rollback: write fields of the one that is under way, unless another has begun or it has ended.
-- KEYS rollback        ARGV the operation's id, now, field, value...
-- Returns 1, or 0 when it is not under way.
local found = redis.call('HMGET', KEYS[1], 'id', 'state')
if found[1] ~= ARGV[1] or found[2] == 'live' or found[2] == 'failed' then
  return 0
end
redis.call('HSET', KEYS[1], 'changed_at_s', ARGV[2])
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return 1
