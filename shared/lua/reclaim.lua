#!lua flags=allow-oom
-- Reclaim: take over entries whose consumer has not renewed them for a while.
-- KEYS stream        ARGV group, consumer, min idle ms, count, start
-- Returns {next start, {entry id, attempts, field values}...}; attempts counts this delivery.
local claimed = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[5], 'COUNT', ARGV[4])
local result = {claimed[1]}
for _, entry in ipairs(claimed[2]) do
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1)
  result[#result + 1] = {entry[1], pending[1] and pending[1][4] or 1, entry[2]}
end
return result
