#!lua flags=allow-oom
-- Commit: make one optimizer step durable and visible, whole, at once. Its groups move from `experience` to `journal`
-- and its policy version is published, in one transaction. With no entries it publishes a version of the step that
-- is already committed (the initial policy, or the weights of a resumed trainer).
-- KEYS run, experience, journal, policies, policy_states, published, steps, counts, audit, marks, prompts, rollouts, trained
-- ARGV epoch, commit id, step, version, parent, record, published payload, report, group, audit length, report length,
--      now, revision of the live settings, plan of the step, entry ids...
-- The parent must be the tip: the newest version, or the one that a rollback went back to. Beside the version stands where
-- the run was: how many groups were trained, and the place in the dataset of the first prompt that was not.
-- Returns 'ok', or why not: 'fenced' (another trainer started), 'diverged:<step>' (the ledger stands at another step),
-- 'missing:<entry>' (that entry is no longer ours).
local run = redis.call('HMGET', KEYS[1], 'trainer_epoch', 'step', 'newest_version', 'last_commit', 'tip', 'cursor', 'shift')
if run[1] ~= ARGV[1] then
  return 'fenced'
end
if run[4] == ARGV[2] then
  return 'ok'
end
local entries = #ARGV - 14
local step = tonumber(run[2] or '0')
if tonumber(ARGV[3]) ~= (entries > 0 and step + 1 or step) then
  return 'diverged:' .. step
end
if (run[5] or run[3] or '') ~= ARGV[5] or tonumber(ARGV[4]) ~= tonumber(run[3] or '-1') + 1 then
  return 'diverged:' .. step
end
for i = 15, #ARGV do
  if #redis.call('XPENDING', KEYS[2], ARGV[9], ARGV[i], ARGV[i], 1) == 0 then
    return 'missing:' .. ARGV[i]
  end
end
for i = 15, #ARGV do
  local fields = redis.call('XRANGE', KEYS[2], ARGV[i], ARGV[i])[1][2]
  local id, data
  for f = 1, #fields, 2 do
    if fields[f] == 'id' then id = fields[f + 1] elseif fields[f] == 'data' then data = fields[f + 1] end
  end
  redis.call('XADD', KEYS[3], '*', 'id', id, 'step', ARGV[3], 'revision', ARGV[13], 'plan', i == 15 and ARGV[14] or '', 'data', data)
  if string.match(id or '', '^%d+$') and tonumber(id) < 4294967296 then
    redis.call('SETBIT', KEYS[13], id, 1)
  end
  redis.call('XACK', KEYS[2], ARGV[9], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
  if tonumber(ARGV[10]) > 0 then
    redis.call('XADD', KEYS[9], 'MAXLEN', '~', ARGV[10], '*', 'id', id, 'outcome', 'trained', 'detail', ARGV[3])
  end
end
if entries > 0 then
  redis.call('HINCRBY', KEYS[8], 'trained', entries)
  redis.call('HSET', KEYS[1], 'last_commit_s', ARGV[12])
  redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[11], '*', 'id', ARGV[3], 'data', ARGV[8])
end
redis.call('HSET', KEYS[1], 'step', ARGV[3], 'newest_version', ARGV[4], 'tip', ARGV[4], 'last_commit', ARGV[2])
redis.call('HSET', KEYS[4], ARGV[4], ARGV[6])
redis.call('HSET', KEYS[5], ARGV[4], 'published')
local in_flight = redis.call('XLEN', KEYS[11]) + redis.call('XLEN', KEYS[12]) + redis.call('XLEN', KEYS[2])
local position = tonumber(run[6] or '0') - tonumber(run[7] or '0') - in_flight
redis.call('HSET', KEYS[10], ARGV[4], (redis.call('HGET', KEYS[8], 'trained') or '0') .. ' ' .. string.format('%d', position))
redis.call('XADD', KEYS[6], '*', 'id', ARGV[4], 'data', ARGV[7])
return 'ok'
