#!lua flags=allow-oom
-- Reclaim: take over entries that were given back or not renewed for a while.
-- KEYS: stream crashes
-- ARGV: group consumer min_idle_ms count given_back stream_name suspect
-- `given_back`: consumer of entries that were given back; `suspect`: 1 to note what a silent consumer held.
-- Returns {entry id, attempts, crashes, field values}...; attempts counts this delivery only if the previous one ended
-- by itself.
local rows = redis.call('XPENDING', stream, group, 'IDLE', min_idle_ms, '-', '+', count)
local result = {}
for _, row in ipairs(rows) do
  local returned = row[2] == given_back
  local attempts = row[4] + (returned and 1 or 0)
  local claimed = redis.call('XCLAIM', stream, group, consumer, 0, row[1], 'RETRYCOUNT', attempts)[1]
  if claimed then
    local field = stream_name .. ':' .. row[1]
    if suspect == '1' and not returned then
      redis.call('HINCRBY', crashes, field, 1)
    end
    result[#result + 1] = {row[1], attempts, tonumber(redis.call('HGET', crashes, field) or '0'), claimed[2]}
  end
end
return result
