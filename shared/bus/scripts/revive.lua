#!lua flags=allow-oom
-- Revive: put a dead letter back onto its stream, as if never handled; of a part, its whole group.
-- KEYS: dead stream counts run generating assembly
-- ARGV: entry_id counted
-- `assembly`: that of the letter's group; `counted`: the outcome it was counted under, '' if not counted.
-- Returns 1; 0 if it is gone; -1 if the run has ended.
local state = redis.call('HGET', run, 'state')
local found = redis.call('XRANGE', dead, entry_id, entry_id)[1]
if not found then
  return 0
end
if state == 'stopped' or state == 'finished' then
  return -1
end
local fields = {}
for i = 1, #found[2], 2 do
  fields[found[2][i]] = found[2][i + 1]
end
redis.call('XDEL', dead, entry_id)
if (fields.samples or '') == '' then
  redis.call('XADD', stream, '*', 'id', fields.id or '', 'data', fields.data or '')
else
  local parts = math.max(1, tonumber(fields.samples))
  redis.call('HSET', generating, fields.id, fields.data)
  redis.call('HSET', assembly, 'parts', parts, 'missing', parts)
  for part = 0, parts - 1 do
    local entry = redis.call('XADD', stream, '*', 'id', fields.id, 'part', fields.samples == '0' and 'all' or part)
    redis.call('HSET', assembly, '@' .. part, entry)
  end
end
if counted ~= '' then
  redis.call('HINCRBY', counts, counted, -1)
end
return 1
