-- Restore: give an empty bus back what a checkpoint knows of its run; or do nothing when the bus knows the run.
-- KEYS run        ARGV field, value, field, value...
-- Returns 1, or 0 when the run has a step already.
if redis.call('HEXISTS', KEYS[1], 'step') == 1 then
  return 0
end
for i = 1, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return 1
