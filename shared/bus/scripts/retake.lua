#!lua flags=allow-oom
-- Retake: take what an earlier process of this name held; no attempt is counted.
-- KEYS: stream crashes
-- ARGV: group consumer start count stream_name suspect
-- `suspect`: 1 to note that the process died while it held them.
-- Returns {entry id, attempts, crashes, field values}..., oldest first.
local rows = redis.call('XPENDING', stream, group, start, '+', count, consumer)
local result = {}
for _, row in ipairs(rows) do
  local claimed = redis.call('XCLAIM', stream, group, consumer, 0, row[1], 'RETRYCOUNT', row[4])[1]
  local field = stream_name .. ':' .. row[1]
  if claimed and suspect == '1' then
    redis.call('HINCRBY', crashes, field, 1)
  end
  local deaths = tonumber(redis.call('HGET', crashes, field) or '0')
  result[#result + 1] = {row[1], row[4], deaths, claimed and claimed[2] or {}}
end
return result
