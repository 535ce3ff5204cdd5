#!lua flags=allow-oom
-- Discard a dead letter, counted, unless it is gone.
-- KEYS: dead counts audit
-- ARGV: entry_id counted outcome detail audit_entries
-- `counted`: its outcome so far, '' if not counted; `outcome`: the new one.
-- Returns 1, or 0 if it is gone.
local found = redis.call('XRANGE', dead, entry_id, entry_id)[1]
if not found then
  return 0
end
redis.call('XDEL', dead, entry_id)
if counted ~= '' then
  redis.call('HINCRBY', counts, counted, -1)
  redis.call('HINCRBY', counts, outcome, 1)
  if tonumber(audit_entries) > 0 then
    redis.call('XADD', audit, 'MAXLEN', '~', audit_entries, '*', 'id', found[2][2], 'outcome', outcome, 'detail', detail)
  end
end
return 1
