#!lua flags=allow-oom
-- Roll back the run to a version, in one transaction: pause it, fence every version of the abandoned branch, shut out
-- the running trainer (its next commit finds another epoch), and restore step, dataset place and the count of trained
-- groups. Loading, publishing and serving follow from this record. The event is written once, even if the answer is
-- lost.
-- KEYS: run policy_states revoked journal counts marks checkpoints rollback pins history events payloads
-- ARGV: expected_newest target target_step now_s reason id pause_reason event event_entries history_entries
-- ARGV: versions...
-- `versions`: those to revoke.
-- Returns 'ok', or 'moved' (read again), 'busy' (another rollback is under way), 'no_checkpoint', 'state:<state>'.
local under_way = redis.call('HMGET', rollback, 'id', 'state')
if under_way[1] == id then
  return 'ok'  -- asked again: the answer was lost
end
local before = redis.call('HMGET', run, 'state', 'newest_version', 'cursor', 'step')
if before[1] ~= 'running' and before[1] ~= 'paused' then
  return 'state:' .. (before[1] or 'created')
end
if under_way[2] and under_way[2] ~= 'live' and under_way[2] ~= 'failed' then
  return 'busy'
end
if before[2] ~= expected_newest then
  return 'moved'
end
if redis.call('HEXISTS', checkpoints, target) == 0 then
  return 'no_checkpoint'
end
for _, version in ipairs(versions) do
  redis.call('SADD', revoked, version)
  redis.call('SREM', pins, version)
  redis.call('HSET', policy_states, version, 'revoked')
end
local trained, position = string.match(redis.call('HGET', marks, target) or '', '^(%d+) (-?%d+)$')
local counted = redis.call('HGET', counts, 'trained') or '0'
local undone = tonumber(counted) - tonumber(trained or counted)
redis.call('HSET', counts, 'trained', trained or counted)
redis.call('HINCRBY', counts, 'undone', string.format('%d', undone))
local start = '-'
repeat  -- few at a time: entries of older releases are large
  local page = redis.call('XRANGE', journal, start, '+', 'COUNT', 8)
  for _, row in ipairs(page) do
    for i = 1, #row[2], 2 do
      if row[2][i] == 'entry' then
        redis.call('HDEL', payloads, 'experience:' .. row[2][i + 1])
      end
    end
    start = '(' .. row[1]
  end
until #page < 8
redis.call('XTRIM', journal, 'MAXLEN', 0)
redis.call('HDEL', run, 'policy_step', 'missing:policy', 'missing:checkpoint')
local epoch = redis.call('HINCRBY', run, 'trainer_epoch', 1)
redis.call('HSET', run, 'state', 'paused', 'reason', reason, 'step', target_step, 'tip', target, 'rollback_epoch', epoch)
if position then
  redis.call('HSET', run, 'shift', string.format('%d', tonumber(before[3] or '0') - tonumber(position)))
end
if before[1] == 'running' then
  redis.call('HSET', run, 'changed_at_s', now_s)
  redis.call('XADD', history, 'MAXLEN', '~', history_entries, '*', 'from', 'running', 'to', 'paused', 'reason', reason, 'at_s', now_s,
    'step', before[4] or '0')
end
redis.call('DEL', rollback)
redis.call('HSET', rollback, 'id', id, 'target', target, 'state', 'loading', 'reason', reason, 'started_at_s', now_s,
  'changed_at_s', now_s, 'resumes', before[1] == 'running' and 1 or 0, 'revoked', #versions, 'undone',
  string.format('%d', undone), 'from_step', before[4] or '0', 'pause_reason', pause_reason)
redis.call('XADD', events, 'MAXLEN', '~', event_entries, '*', 'id', '', 'data', event)
return 'ok'
