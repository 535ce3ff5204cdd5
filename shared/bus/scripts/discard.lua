#!lua flags=allow-oom
-- Discard: let a dead letter leave the run for good, counted; or do nothing when it is gone.
-- KEYS: dead counts audit
-- ARGV: entry_id counted outcome detail audit_entries
-- `counted` is the outcome under which the letter was counted, '' if it was not; `outcome` the one from now on.
-- Returns 1, or 0 when there is no such dead letter.
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
