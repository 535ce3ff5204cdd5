#!lua flags=allow-oom
-- Try alone: count an attempt before an entry is handled alone, so that it counts if the process dies.
-- KEYS: stream
-- ARGV: group consumer entry_id attempts
-- Returns 1, or 0 if the entry is no longer this consumer's.
local pending = redis.pcall('XPENDING', stream, group, entry_id, entry_id, 1)
if pending.err or not pending[1] or pending[1][2] ~= consumer then
  return 0
end
redis.call('XCLAIM', stream, group, consumer, 0, entry_id, 'RETRYCOUNT', attempts, 'JUSTID')
return 1
