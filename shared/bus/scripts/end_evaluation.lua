#!lua flags=allow-oom
-- End an evaluation: keep what it found and forget what it needed on the way; or do nothing when it ended before.
-- KEYS: evaluation evaluations evaluation_answers
-- ARGV: version result
-- `result` is JSON; empty: keep nothing.
-- Returns 1, or 0 when this evaluation is not under way.
if redis.call('HGET', evaluation, 'version') ~= version then
  return 0
end
if result ~= '' then
  redis.call('HSET', evaluations, version, result)
end
redis.call('DEL', evaluation, evaluation_answers)
return 1
