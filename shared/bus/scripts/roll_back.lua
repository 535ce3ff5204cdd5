#!lua flags=allow-oom
-- Roll back: take the run back to a version, in one transaction. It pauses, every version of the branch that is left is
-- fenced, the trainer that runs is shut out (its next commit finds another epoch), and step, place in the dataset and the
-- count of trained groups are again what they were. Loading, publishing and serving follow from what is written here, and so does
-- the event, told once whoever hears the answer.
-- KEYS run, policy_states, revoked, journal, counts, marks, checkpoints, rollback, pins, run history, events
-- ARGV expected newest version, target, its step, now, reason, rollback's id, event, events' length, versions to revoke...
-- Returns 'ok', or why not: 'moved' (read again), 'busy' (another rollback is under way), 'no_checkpoint', 'state:<state>'.
local under_way = redis.call('HMGET', KEYS[8], 'id', 'state')
if under_way[1] == ARGV[6] then
  return 'ok'  -- asked again: the answer was lost
end
local run = redis.call('HMGET', KEYS[1], 'state', 'newest_version', 'cursor', 'step')
if run[1] ~= 'running' and run[1] ~= 'paused' then
  return 'state:' .. (run[1] or 'created')
end
if under_way[2] and under_way[2] ~= 'live' and under_way[2] ~= 'failed' then
  return 'busy'
end
if run[2] ~= ARGV[1] then
  return 'moved'
end
if redis.call('HEXISTS', KEYS[7], ARGV[2]) == 0 then
  return 'no_checkpoint'
end
for i = 9, #ARGV do
  redis.call('SADD', KEYS[3], ARGV[i])
  redis.call('SREM', KEYS[9], ARGV[i])
  redis.call('HSET', KEYS[2], ARGV[i], 'revoked')
end
local trained, position = string.match(redis.call('HGET', KEYS[6], ARGV[2]) or '', '^(%d+) (-?%d+)$')
local counted = redis.call('HGET', KEYS[5], 'trained') or '0'
local undone = tonumber(counted) - tonumber(trained or counted)
redis.call('HSET', KEYS[5], 'trained', trained or counted)
redis.call('HINCRBY', KEYS[5], 'undone', string.format('%d', undone))
redis.call('XTRIM', KEYS[4], 'MAXLEN', 0)
local epoch = redis.call('HINCRBY', KEYS[1], 'trainer_epoch', 1)
redis.call('HSET', KEYS[1], 'state', 'paused', 'reason', ARGV[5], 'step', ARGV[3], 'tip', ARGV[2], 'rollback_epoch', epoch)
if position then
  redis.call('HSET', KEYS[1], 'shift', string.format('%d', tonumber(run[3] or '0') - tonumber(position)))
end
if run[1] == 'running' then
  redis.call('HSET', KEYS[1], 'changed_at_s', ARGV[4])
  redis.call('XADD', KEYS[10], 'MAXLEN', '~', 10000, '*', 'from', 'running', 'to', 'paused', 'reason', ARGV[5], 'at_s', ARGV[4],
    'step', run[4] or '0')
end
redis.call('DEL', KEYS[8])
redis.call('HSET', KEYS[8], 'id', ARGV[6], 'target', ARGV[2], 'state', 'loading', 'reason', ARGV[5], 'started_at_s', ARGV[4],
  'changed_at_s', ARGV[4], 'resumes', run[1] == 'running' and 1 or 0, 'revoked', #ARGV - 8, 'undone',
  string.format('%d', undone), 'from_step', run[4] or '0')
redis.call('XADD', KEYS[11], 'MAXLEN', '~', ARGV[8], '*', 'id', '', 'data', ARGV[7])
return 'ok'
