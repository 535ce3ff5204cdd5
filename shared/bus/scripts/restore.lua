#!lua flags=allow-oom
-- Restore: give an empty bus back what a checkpoint knows of its run; or do nothing when the bus knows the run.
-- KEYS run, counts        ARGV number of the run's fields, then field, value... of the run and of the counts
-- Returns 1, or 0 when the run has a step already.
if redis.call('HEXISTS', KEYS[1], 'step') == 1 then
  return 0
end
local fields = tonumber(ARGV[1])
for i = 2, #ARGV, 2 do
  redis.call('HSET', i <= 2 * fields and KEYS[1] or KEYS[2], ARGV[i], ARGV[i + 1])
end
return 1
