#!lua flags=allow-oom
-- Leave: take an entry off its stream for good, counted, with its reason. With a part, its whole group leaves.
-- KEYS: input counts audit dead generating assembly crashes causes payloads
-- ARGV: group stream_name entry_id group_id part outcome detail attempts keep audit_entries counted
-- `part`: "" for an entry without an assembly; `keep`: 1 to move the entry, of a part the group's prompt, to the dead
-- letters; `counted`: 1 if its ending is counted.
-- Returns 1, or 0 if another consumer finished this entry first.
local kept = keep == '1' and redis.call('XRANGE', input, entry_id, entry_id) or {}
if redis.call('XACK', input, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', input, entry_id)
redis.call('HDEL', crashes, stream_name .. ':' .. entry_id)
redis.call('HDEL', causes, stream_name .. ':' .. entry_id)
local data, parts = '', ''
if kept[1] then
  local fields = kept[1][2]
  for i = 1, #fields, 2 do
    if fields[i] == 'data' then data = fields[i + 1] end
  end
  if data == '' then
    data = redis.call('HGET', payloads, stream_name .. ':' .. entry_id) or ''
  end
end
redis.call('HDEL', payloads, stream_name .. ':' .. entry_id)
if part ~= '' then
  if redis.call('HGET', assembly, '@' .. (part == 'all' and '0' or part)) ~= entry_id then
    return 0  -- not an entry of this group
  end
  data, parts = redis.call('HGET', generating, group_id) or '', part == 'all' and '0' or redis.call('HGET', assembly, 'parts')
  for place = 0, tonumber(redis.call('HGET', assembly, 'parts')) - 1 do
    local other = redis.call('HGET', assembly, '@' .. place)
    if other then
      redis.call('XACK', input, group, other)
      redis.call('XDEL', input, other)
      redis.call('HDEL', crashes, stream_name .. ':' .. other)
      redis.call('HDEL', causes, stream_name .. ':' .. other)
    end
  end
  redis.call('DEL', assembly)
  redis.call('HDEL', generating, group_id)
end
if keep == '1' then
  redis.call('XADD', dead, '*', 'id', group_id, 'data', data, 'reason', detail, 'attempts', attempts, 'entry', entry_id,
    'samples', parts)
end
if counted == '1' then
  redis.call('HINCRBY', counts, outcome, 1)
  if tonumber(audit_entries) > 0 then
    redis.call('XADD', audit, 'MAXLEN', '~', audit_entries, '*', 'id', group_id, 'outcome', outcome, 'detail', detail)
  end
end
return 1
