#!lua flags=allow-oom
-- Restore: give an empty bus back what a checkpoint knows of its run; or do nothing when the bus knows the run.
-- KEYS: run counts
-- ARGV: run_pairs fields...
-- `fields` are field, value, …: the first `run_pairs` of them are the run's, the others the counts'.
-- Returns 1, or 0 when the run has a step already.
if redis.call('HEXISTS', run, 'step') == 1 then
  return 0
end
for i = 1, #fields, 2 do
  redis.call('HSET', i < 2 * tonumber(run_pairs) and run or counts, fields[i], fields[i + 1])
end
return 1
