#!lua flags=allow-oom
-- Transition: change the run's state if it is one of those allowed, and write down why.
-- KEYS run, history        ARGV new state, reason, now, allowed states...
-- Leaving `paused` or `finished` for `running` adds the time in which nothing was trained to `paused_s`.
-- Returns {1 or 0, the state it found}.
local found = redis.call('HGET', KEYS[1], 'state') or ''
for i = 4, #ARGV do
  if found == ARGV[i] then
    if (found == 'paused' or found == 'finished') and ARGV[1] == 'running' then
      local since = tonumber(redis.call('HGET', KEYS[1], found == 'paused' and 'changed_at_s' or 'last_commit_s') or ARGV[3])
      redis.call('HINCRBYFLOAT', KEYS[1], 'paused_s', string.format('%.6f', tonumber(ARGV[3]) - since))
    end
    redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2], 'changed_at_s', ARGV[3])
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', 10000, '*', 'from', found, 'to', ARGV[1], 'reason', ARGV[2],
      'at_s', ARGV[3], 'step', redis.call('HGET', KEYS[1], 'step') or '0')
    return {1, found}
  end
end
return {0, found}
