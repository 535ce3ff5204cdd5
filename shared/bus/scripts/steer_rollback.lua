#!lua flags=allow-oom
-- Steer a rollback: write fields, unless another has begun or it has ended.
-- KEYS: rollback
-- ARGV: id now_s fields...
-- `fields`: field, value, …
-- Returns 1, or 0 if it is not under way.
local found = redis.call('HMGET', rollback, 'id', 'state')
if found[1] ~= id or found[2] == 'live' or found[2] == 'failed' then
  return 0
end
redis.call('HSET', rollback, 'changed_at_s', now_s)
for i = 1, #fields, 2 do
  redis.call('HSET', rollback, fields[i], fields[i + 1])
end
return 1
