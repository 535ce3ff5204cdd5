#!lua flags=allow-oom
-- Restore a run from a checkpoint on an empty bus.
-- KEYS: run counts
-- ARGV: run_pairs fields...
-- `fields`: field, value, …: the first `run_pairs` pairs are the run's, the others the counts'.
-- Returns 1, or 0 if the run already has a step.
if redis.call('HEXISTS', run, 'step') == 1 then
  return 0
end
for i = 1, #fields, 2 do
  redis.call('HSET', i < 2 * tonumber(run_pairs) and run or counts, fields[i], fields[i + 1])
end
return 1
