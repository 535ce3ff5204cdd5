#!lua flags=allow-oom
-- Grant the devices of one request, all or none. Every grant gets the next term; its holder's older terms are fenced.
-- KEYS: run device_requests devices...
-- ARGV: leader_term replica request process phase ttl_ms
-- Returns the term, or 0: another coordinator leads, the request changed, or a device is held.
if leader_term ~= redis.call('HGET', run, 'leader_term') then
  return 0
end
if redis.call('HGET', device_requests, replica) ~= request then
  return 0
end
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for _, device in ipairs(devices) do
  local held = redis.call('HMGET', device, 'process', 'until_ms')
  if held[1] and tonumber(held[2]) > now_ms then
    return 0
  end
end
local term = redis.call('HINCRBY', run, 'device_term', 1)
for _, device in ipairs(devices) do
  redis.call('HDEL', device, 'rung')
  redis.call('HSET', device, 'replica', replica, 'process', process, 'phase', phase, 'term', term,
    'since_ms', string.format('%.0f', now_ms), 'until_ms', string.format('%.0f', now_ms + tonumber(ttl_ms)))
end
redis.call('HDEL', device_requests, replica)
return term
