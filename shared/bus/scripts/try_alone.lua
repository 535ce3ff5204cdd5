#!lua flags=allow-oom
-- Try alone: count an attempt before an entry is worked on alone, so that a process that dies of it has counted it.
-- KEYS stream        ARGV group, consumer, entry id, attempts
-- Returns 1, or 0 where the entry is no longer this consumer's.
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)
if pending.err or not pending[1] or pending[1][2] ~= ARGV[2] then
  return 0
end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', ARGV[4], 'JUSTID')
return 1
