#!lua flags=allow-oom
-- Skip time: count a gap in which none of the run's processes ran as a pause, once.
-- KEYS: run
-- ARGV: expected_alive_s gap_s until_s now_s gpu_time
-- `expected_alive_s`: what the caller read; another value says that the gap was counted already.
-- `until_s`: when it ended; the trainer may have committed since. `gpu_time`: GPU-seconds so far, counted until now.
if tonumber(redis.call('HGET', run, 'alive_s') or '0') ~= tonumber(expected_alive_s) then
  return 0
end
redis.call('HINCRBYFLOAT', run, 'paused_s', string.format('%.6f', tonumber(gap_s)))
if tonumber(redis.call('HGET', run, 'last_commit_s') or '0') < tonumber(until_s) then
  redis.call('HINCRBYFLOAT', run, 'paused_since_commit_s', string.format('%.6f', tonumber(gap_s)))
end
redis.call('HSET', run, 'alive_s', now_s, 'resumed_s', now_s, 'gpu_time', gpu_time)
return 1
