#!lua flags=allow-oom
-- Retake: what an earlier process of this name held when it died; no attempt is counted.
-- KEYS stream, crashes        ARGV group, consumer, start, count, stream's name, suspect (1: note that its process died)
-- Returns {entry id, attempts, crashes, field values}..., oldest first.
local rows = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])
local result = {}
for _, row in ipairs(rows) do
  local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, row[1], 'RETRYCOUNT', row[4])[1]
  local field = ARGV[5] .. ':' .. row[1]
  if claimed and ARGV[6] == '1' then
    redis.call('HINCRBY', KEYS[2], field, 1)
  end
  local crashes = tonumber(redis.call('HGET', KEYS[2], field) or '0')
  result[#result + 1] = {row[1], row[4], crashes, claimed and claimed[2] or {}}
end
return result
