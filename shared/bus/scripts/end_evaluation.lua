#!lua flags=allow-oom
-- End an evaluation: keep its result, delete its state.
-- KEYS: evaluation evaluations evaluation_answers holds
-- ARGV: version result
-- `result`: JSON; empty: keep nothing.
-- Returns 1, or 0 if this evaluation is not under way.
if redis.call('HGET', evaluation, 'version') ~= version then
  return 0
end
if result ~= '' then
  redis.call('HSET', evaluations, version, result)
end
redis.call('DEL', evaluation, evaluation_answers)
redis.call('XADD', holds, 'MAXLEN', '~', 16, '*', 'id', version)
return 1
