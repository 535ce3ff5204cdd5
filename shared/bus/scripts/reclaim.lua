#!lua flags=allow-oom
-- Reclaim: take over entries whose consumer has not renewed them for a while, or gave them back.
-- KEYS stream, crashes
-- ARGV group, consumer, min idle ms, count, consumer of what was given back, stream's name, suspect (1: note what a silent consumer held)
-- Returns {entry id, attempts, crashes, field values}...; attempts counts this delivery only where the one before it ended by itself.
local rows = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', ARGV[4])
local result = {}
for _, row in ipairs(rows) do
  local returned = row[2] == ARGV[5]
  local attempts = row[4] + (returned and 1 or 0)
  local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, row[1], 'RETRYCOUNT', attempts)[1]
  if claimed then
    local field = ARGV[6] .. ':' .. row[1]
    if ARGV[7] == '1' and not returned then
      redis.call('HINCRBY', KEYS[2], field, 1)
    end
    result[#result + 1] = {row[1], attempts, tonumber(redis.call('HGET', KEYS[2], field) or '0'), claimed[2]}
  end
end
return result
