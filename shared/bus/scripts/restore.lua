#!lua flags=allow-oom
-- Restore a run from a checkpoint on an empty bus.
-- KEYS: run counts journal
-- ARGV: run_pairs journal_entry fields...
-- `fields`: field, value, …: the first `run_pairs` pairs are the run's, the others the counts'.
-- `journal_entry`: the checkpoint's, or "". Later entries get larger ids, also where this server's clock is behind.
-- Returns 1, or 0 if the run already has a step.
if redis.call('HEXISTS', run, 'step') == 1 then
  return 0
end
if journal_entry ~= '' and not redis.pcall('XADD', journal, journal_entry, 'id', '').err then
  redis.call('XDEL', journal, journal_entry)
end
for i = 1, #fields, 2 do
  redis.call('HSET', i < 2 * tonumber(run_pairs) and run or counts, fields[i], fields[i + 1])
end
return 1
