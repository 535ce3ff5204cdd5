#!lua flags=allow-oom
-- Transition: change the run's state if it is in `allowed`, and at `step` unless that is "", and record the reason.
-- KEYS: run history
-- ARGV: to reason now_s step history_entries allowed...
-- Leaving `paused`, or `finished` for `running`, adds that time to `paused_s`, and what of it came after the last commit to
-- `paused_since_commit_s`, if training has begun.
-- Returns {1 or 0, the previous state}.
local found = redis.call('HGET', run, 'state') or ''
if step ~= '' and step ~= (redis.call('HGET', run, 'step') or '0') then
  return {0, found}
end
for _, state in ipairs(allowed) do
  if found == state then
    local leaves = found == 'paused' or (found == 'finished' and to == 'running')
    if leaves and redis.call('HEXISTS', run, 'first_admission_s') == 1 then
      local times = redis.call('HMGET', run, 'changed_at_s', 'last_commit_s', 'paused_since_commit_s')
      local committed_s = tonumber(times[2] or '0')
      local since_s = tonumber(times[1] or now_s)  -- also of a finished run whose lost bus did not name its last commit
      if found == 'finished' and times[2] then
        since_s = committed_s + tonumber(times[3] or '0')
      end
      redis.call('HINCRBYFLOAT', run, 'paused_s', string.format('%.6f', tonumber(now_s) - since_s))
      redis.call('HINCRBYFLOAT', run, 'paused_since_commit_s',
        string.format('%.6f', tonumber(now_s) - math.max(since_s, committed_s)))
    end
    redis.call('HSET', run, 'state', to, 'reason', reason, 'changed_at_s', now_s)
    redis.call('XADD', history, 'MAXLEN', '~', history_entries, '*', 'from', found, 'to', to, 'reason', reason,
      'at_s', now_s, 'step', redis.call('HGET', run, 'step') or '0')
    return {1, found}
  end
end
return {0, found}
