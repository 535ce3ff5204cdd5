#!lua flags=allow-oom
-- End an evaluation: keep what it found and forget what it needed on the way; or do nothing when it ended before.
-- KEYS evaluation, evaluations, evaluation_answers        ARGV version, result (JSON; empty: keep nothing)
-- Returns 1, or 0 when this evaluation is not under way.
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then
  return 0
end
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
end
redis.call('DEL', KEYS[1], KEYS[3])
return 1
