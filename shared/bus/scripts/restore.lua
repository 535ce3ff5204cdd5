#!lua flags=allow-oom
-- Restore a run from a checkpoint, on an empty bus or on one with older data.
-- KEYS: run counts journal prompts rollouts experience generating rollback payloads assemblies...
-- ARGV: is_known run_pairs journal_entry fields...
-- `is_known`: 1 if the bus has an older step of the run; what is in flight there (`assemblies`: its groups') is deleted,
-- and a rollback forgotten: it ended before the checkpoint, and the run continues if it was to continue.
-- `fields`: field, value, …: the first `run_pairs` pairs are the run's, the others the counts'.
-- `journal_entry`: the checkpoint's, or "". Later entries get larger ids, also where this server's clock is behind.
-- Returns 1, or 0 if the run already has a step and is not known to.
if is_known == '1' then
  local under_way = redis.call('HMGET', rollback, 'state', 'resumes')
  if under_way[2] == '1' and under_way[1] ~= 'live' and under_way[1] ~= 'failed' then
    redis.call('HSET', run, 'state', 'running', 'reason', '')
  end
  redis.call('DEL', counts, journal, prompts, rollouts, experience, generating, rollback, payloads)
  for _, assembly in ipairs(assemblies) do
    redis.call('DEL', assembly)
  end
elseif redis.call('HEXISTS', run, 'step') == 1 then
  return 0
end
if journal_entry ~= '' and not redis.pcall('XADD', journal, journal_entry, 'id', '').err then
  redis.call('XDEL', journal, journal_entry)
end
for i = 1, #fields, 2 do
  redis.call('HSET', i < 2 * tonumber(run_pairs) and run or counts, fields[i], fields[i + 1])
end
return 1
