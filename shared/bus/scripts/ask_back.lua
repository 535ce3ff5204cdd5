#!lua flags=allow-oom
-- Ask the holder of a device to free it down to a rung of the ladder. ``offload_bytes``: what the trainer has to move to
-- the host for the next phase, at rung 3.
-- KEYS: run device
-- ARGV: leader_term term rung offload_bytes
-- Returns 1, or 0: another coordinator leads, or the grant of ``term`` ended.
if leader_term ~= redis.call('HGET', run, 'leader_term') then
  return 0
end
local held = redis.call('HMGET', device, 'process', 'term')
if not held[1] or held[2] ~= term then
  return 0
end
redis.call('HSET', device, 'rung', rung, 'asked_bytes', offload_bytes)
return 1
