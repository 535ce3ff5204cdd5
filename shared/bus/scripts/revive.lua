#!lua flags=allow-oom
-- Revive: put a dead letter back onto its stream, as if never handled.
-- KEYS: dead stream counts run
-- ARGV: entry_id counted
-- `counted`: the outcome it was counted under, '' if not counted.
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
redis.call('XADD', stream, '*', 'id', fields.id or '', 'data', fields.data or '')
if counted ~= '' then
  redis.call('HINCRBY', counts, counted, -1)
end
return 1
