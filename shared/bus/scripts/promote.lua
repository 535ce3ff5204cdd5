#!lua flags=allow-oom
-- Promote: make a published version the head, retire the one before it, and tell every replica; or do nothing.
-- KEYS published, run, policy_states, policy
-- ARGV group, entry id, version, payload, policy length, leader's term or ""
-- Returns 1, or 0 when this entry was promoted before, or its version is revoked, or a newer one is the head
-- already, or another coordinator leads: then the entry stays for it.
if ARGV[6] ~= '' and ARGV[6] ~= redis.call('HGET', KEYS[2], 'leader_term') then
  return 0
end
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  return 0
end
redis.call('XDEL', KEYS[1], ARGV[2])
if redis.call('HGET', KEYS[3], ARGV[3]) == 'revoked' then
  return 0
end
local head = redis.call('HGET', KEYS[2], 'head')
if head and tonumber(head) >= tonumber(ARGV[3]) then
  if tonumber(head) > tonumber(ARGV[3]) then
    redis.call('HSET', KEYS[3], ARGV[3], 'retired')
  end
  return 0
end
if head and redis.call('HGET', KEYS[3], head) ~= 'revoked' then
  redis.call('HSET', KEYS[3], head, 'retired')
end
redis.call('HSET', KEYS[2], 'head', ARGV[3])
redis.call('HSET', KEYS[3], ARGV[3], 'live')
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[5], '*', 'id', ARGV[3], 'data', ARGV[4])
return 1
