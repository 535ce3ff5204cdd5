#!lua flags=allow-oom
-- Try alone: count an attempt before an entry is worked on alone, so that a process that dies of it has counted it.
-- KEYS: stream
-- ARGV: group consumer entry_id attempts
-- Returns 1, or 0 where the entry is no longer this consumer's.
local pending = redis.pcall('XPENDING', stream, group, entry_id, entry_id, 1)
if pending.err or not pending[1] or pending[1][2] ~= consumer then
  return 0
end
redis.call('XCLAIM', stream, group, consumer, 0, entry_id, 'RETRYCOUNT', attempts, 'JUSTID')
return 1
