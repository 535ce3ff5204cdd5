#!lua flags=allow-oom
-- Commit one optimizer step atomically: its groups move from `experience` to `journal`, without their payloads, which stay
-- where they are, and its policy version is published. Without entries, publish a version of the already committed step
-- (the initial policy, or a resumed trainer's weights).
-- KEYS: run experience journal policies policy_states published steps counts audit marks generating rollouts trained
-- KEYS: signals crashes causes payloads
-- ARGV: epoch commit_id step version parent record report group audit_entries report_entries now_s
-- ARGV: revision plan change rate entries...
-- The parent must be the tip: the newest version, or a rollback's target. A mark of each version keeps the number of
-- trained groups and the dataset place of the first untrained prompt. `change`, if any, is of the problems' signals: each
-- group's moves its problem's by `rate` towards it (the first one is it), or all are replaced (`shared/bus/stores/experience/signals.py`).
-- Returns 'ok', or 'fenced' (another trainer started), 'diverged:<step>' (the ledger is at another step),
-- 'missing:<entry>' (no longer ours).
local state = redis.call('HMGET', run, 'trainer_epoch', 'step', 'newest_version', 'last_commit', 'tip', 'cursor', 'shift')
if state[1] ~= epoch then
  return 'fenced'
end
if state[4] == commit_id then
  return 'ok'
end
local committed = tonumber(state[2] or '0')
if tonumber(step) ~= committed + (#entries > 0 and 1 or 0) then
  return 'diverged:' .. committed
end
if (state[5] or state[3] or '') ~= parent or tonumber(version) ~= tonumber(state[3] or '-1') + 1 then
  return 'diverged:' .. committed
end
for _, entry in ipairs(entries) do
  if #redis.call('XPENDING', experience, group, entry, entry, 1) == 0 then
    return 'missing:' .. entry
  end
end
for i, entry in ipairs(entries) do
  local fields = redis.call('XRANGE', experience, entry, entry)[1][2]
  local id, data
  for f = 1, #fields, 2 do
    if fields[f] == 'id' then id = fields[f + 1] elseif fields[f] == 'data' then data = fields[f + 1] end
  end
  if data ~= '' then  -- revived, or of an older release
    redis.call('HSET', payloads, 'experience:' .. entry, data)
  end
  redis.call('XADD', journal, '*', 'id', id, 'step', step, 'version', version, 'revision', revision,
    'plan', i == 1 and plan or '', 'entry', entry)
  if string.match(id or '', '^%d+$') and tonumber(id) < 4294967296 then
    redis.call('SETBIT', trained, id, 1)
  end
  redis.call('XACK', experience, group, entry)
  redis.call('XDEL', experience, entry)
  redis.call('HDEL', crashes, 'experience:' .. entry)
  redis.call('HDEL', causes, 'experience:' .. entry)
  if tonumber(audit_entries) > 0 then
    redis.call('XADD', audit, 'MAXLEN', '~', audit_entries, '*', 'id', id, 'outcome', 'trained', 'detail', step)
  end
end
if #entries > 0 then
  redis.call('HINCRBY', counts, 'trained', #entries)
  redis.call('HSET', run, 'last_commit_s', now_s, 'paused_since_commit_s', 0)
  redis.call('XADD', steps, 'MAXLEN', '~', report_entries, '*', 'id', step, 'data', report)
end
if change ~= '' then
  local parts = cjson.decode(change)
  if parts.whole ~= cjson.null then
    redis.call('DEL', signals)
    for _, pair in ipairs(parts.whole) do
      redis.call('HSET', signals, pair[1], pair[2])
    end
  end
  for _, pair in ipairs(parts.groups) do
    local before = tonumber(redis.call('HGET', signals, pair[1]) or pair[2])
    redis.call('HSET', signals, pair[1], string.format('%.17g', before + tonumber(rate) * (pair[2] - before)))
  end
end
redis.call('HSET', run, 'step', step, 'newest_version', version, 'tip', version, 'last_commit', commit_id)
redis.call('HSET', policies, version, record)
redis.call('HSET', policy_states, version, 'published')
local in_flight = redis.call('HLEN', generating) + redis.call('XLEN', rollouts) + redis.call('XLEN', experience)
local position = tonumber(state[6] or '0') - tonumber(state[7] or '0') - in_flight
redis.call('HSET', marks, version, (redis.call('HGET', counts, 'trained') or '0') .. ' ' .. string.format('%d', position))
redis.call('XADD', published, '*', 'id', version, 'data', record)
return 'ok'
