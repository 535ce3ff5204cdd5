#!lua flags=allow-oom
-- Transition: change the run's state if it is in `allowed`, and at `step` unless that is "", and record the reason.
-- KEYS: run history
-- ARGV: to reason now_s step history_entries allowed...
-- Leaving `paused` or `finished` for `running` adds that time to `paused_s`.
-- Returns {1 or 0, the previous state}.
local found = redis.call('HGET', run, 'state') or ''
if step ~= '' and step ~= (redis.call('HGET', run, 'step') or '0') then
  return {0, found}
end
for _, state in ipairs(allowed) do
  if found == state then
    if (found == 'paused' or found == 'finished') and to == 'running' then
      local since = tonumber(redis.call('HGET', run, found == 'paused' and 'changed_at_s' or 'last_commit_s') or now_s)
      redis.call('HINCRBYFLOAT', run, 'paused_s', string.format('%.6f', tonumber(now_s) - since))
    end
    redis.call('HSET', run, 'state', to, 'reason', reason, 'changed_at_s', now_s)
    redis.call('XADD', history, 'MAXLEN', '~', history_entries, '*', 'from', found, 'to', to, 'reason', reason,
      'at_s', now_s, 'step', redis.call('HGET', run, 'step') or '0')
    return {1, found}
  end
end
return {0, found}
