#!lua flags=allow-oom
-- Ask the holder of a device to free it down to a rung of the ladder.
-- KEYS: run device
-- ARGV: leader_term term rung
-- Returns 1, or 0: another coordinator leads, or the grant of ``term`` ended.
if leader_term ~= redis.call('HGET', run, 'leader_term') then
  return 0
end
local held = redis.call('HMGET', device, 'process', 'term')
if not held[1] or held[2] ~= term then
  return 0
end
redis.call('HSET', device, 'rung', rung)
return 1
