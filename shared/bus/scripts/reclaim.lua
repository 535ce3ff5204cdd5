#!lua flags=allow-oom
-- Reclaim: take over entries that were given back or not renewed for a while.
-- KEYS: stream crashes swept
-- ARGV: group consumer min_idle_ms count given_back stream_name suspect
-- `given_back`: consumer of entries that were given back; `suspect`: 1 to note what a silent consumer held. To look for
-- those walks all that is pending, so one worker does it at a time, and as long as `swept` lives none again.
-- Returns {entry id, attempts, crashes, field values}...; attempts counts this delivery only if the previous one ended
-- by itself.
local result, taken = {}, {}
local function take(rows)
  for _, row in ipairs(rows) do
    local returned = row[2] == given_back
    local attempts = row[4] + (returned and 1 or 0)
    local claimed = not taken[row[1]] and redis.call('XCLAIM', stream, group, consumer, 0, row[1], 'RETRYCOUNT', attempts)[1]
    taken[row[1]] = true
    if claimed then
      local field = stream_name .. ':' .. row[1]
      if suspect == '1' and not returned then
        redis.call('HINCRBY', crashes, field, 1)
      end
      result[#result + 1] = {row[1], attempts, tonumber(redis.call('HGET', crashes, field) or '0'), claimed[2]}
    end
  end
  return #rows
end
local room = count - take(redis.call('XPENDING', stream, group, 'IDLE', min_idle_ms, '-', '+', count, given_back))
local rest_ms = math.floor(math.min(min_idle_ms / 3, 2000))
if room > 0 and (rest_ms < 1 or redis.call('SET', swept, consumer, 'NX', 'PX', rest_ms)) then
  if take(redis.call('XPENDING', stream, group, 'IDLE', min_idle_ms, '-', '+', room)) == room then
    redis.call('DEL', swept)  -- there may be more
  end
end
return result
