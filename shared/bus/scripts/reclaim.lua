#!lua flags=allow-oom
-- Reclaim: take over entries that were given back, or that a consumer without a lease has held for a while.
-- KEYS: stream crashes swept leases
-- ARGV: group consumer min_idle_ms count given_back stream_name suspects
-- `given_back`: consumer of entries that were given back; `suspects`: how many of silent consumers to take and to note as
-- such, or -1 to take them as others. One worker at a time looks for those, and as long as `swept` lives none again.
-- `min_idle_ms`: 0 to take from any consumer. Consumers of older releases renew entry by entry, so that theirs are not
-- idle; they do not know leases, and would take what is held under one: the workers of a stream are of one release
-- (docs/operations.md).
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
      if suspects ~= '-1' and not returned then
        redis.call('HINCRBY', crashes, field, 1)
      end
      result[#result + 1] = {row[1], attempts, tonumber(redis.call('HGET', crashes, field) or '0'), claimed[2]}
    end
  end
  return #rows
end
local room = count - take(redis.call('XPENDING', stream, group, 'IDLE', min_idle_ms, '-', '+', count, given_back))
if suspects ~= '-1' then
  room = math.min(room, tonumber(suspects))
end
local rest_ms = math.floor(math.min(min_idle_ms / 3, 2000))
if room > 0 and (rest_ms < 1 or redis.call('SET', swept, consumer, 'NX', 'PX', rest_ms)) then
  local time, leased = redis.call('TIME'), {[given_back] = true}
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', time[1] * 1000 + math.floor(time[2] / 1000))
  for _, name in ipairs(tonumber(min_idle_ms) > 0 and redis.call('ZRANGE', leases, 0, -1) or {}) do
    leased[name] = true
  end
  for _, row in ipairs(redis.call('XPENDING', stream, group)[4] or {}) do
    if room > 0 and not leased[row[1]] then
      room = room - take(redis.call('XPENDING', stream, group, 'IDLE', min_idle_ms, '-', '+', room, row[1]))
    end
  end
  if room <= 0 then
    redis.call('DEL', swept)  -- there may be more
  end
end
return result
