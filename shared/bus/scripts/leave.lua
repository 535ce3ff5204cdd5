#!lua flags=allow-oom
-- Leave: take an entry off its stream for good, counted, with its reason.
-- KEYS: input counts audit dead
-- ARGV: group entry_id group_id outcome detail attempts keep audit_entries counted
-- `keep`: 1 to move the entry to the dead letters; `counted`: 1 if its ending is counted.
-- Returns 1, or 0 if another consumer finished this entry first.
local kept = keep == '1' and redis.call('XRANGE', input, entry_id, entry_id) or {}
if redis.call('XACK', input, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', input, entry_id)
if keep == '1' then
  local data = ''
  if kept[1] then
    local fields = kept[1][2]
    for i = 1, #fields, 2 do
      if fields[i] == 'data' then data = fields[i + 1] end
    end
  end
  redis.call('XADD', dead, '*', 'id', group_id, 'data', data, 'reason', detail, 'attempts', attempts, 'entry', entry_id)
end
if counted == '1' then
  redis.call('HINCRBY', counts, outcome, 1)
  if tonumber(audit_entries) > 0 then
    redis.call('XADD', audit, 'MAXLEN', '~', audit_entries, '*', 'id', group_id, 'outcome', outcome, 'detail', detail)
  end
end
return 1
