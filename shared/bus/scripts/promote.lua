#!lua flags=allow-oom
-- Promote: make a published version the head, retire the previous one, and notify every replica.
-- KEYS: published run policy_states policy
-- ARGV: group entry_id version payload policy_entries term digest
-- `term`: the leader's, or "".
-- Returns 1, or 0 if already promoted, revoked, or older than the head, or if another coordinator leads: then the entry
-- stays for it.
if term ~= '' and term ~= redis.call('HGET', run, 'leader_term') then
  return 0
end
if redis.call('XACK', published, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', published, entry_id)
if redis.call('HGET', policy_states, version) == 'revoked' then
  return 0
end
local head = redis.call('HGET', run, 'head')
if head and tonumber(head) >= tonumber(version) then
  if tonumber(head) > tonumber(version) then
    redis.call('HSET', policy_states, version, 'retired')
  end
  return 0
end
if head and redis.call('HGET', policy_states, head) ~= 'revoked' then
  redis.call('HSET', policy_states, head, 'retired')
end
redis.call('HSET', run, 'head', version, 'head_digest', version .. ' ' .. digest)
redis.call('HSET', policy_states, version, 'live')
redis.call('XADD', policy, 'MAXLEN', '~', policy_entries, '*', 'id', version, 'data', payload)
return 1
