#!lua flags=allow-oom
-- Request devices for one phase. A process restarted under the same replica name ends its predecessor's grants.
-- KEYS: device_requests devices...
-- ARGV: replica process request
-- Returns 1, or 0 if the process holds them already.
local own = 0
for _, device in ipairs(devices) do
  local held = redis.call('HMGET', device, 'replica', 'process')
  if held[1] == replica then
    if held[2] == process then
      own = own + 1
    else
      redis.call('HDEL', device, 'replica', 'process', 'phase', 'rung')
    end
  end
end
if own == #devices then
  return 0
end
redis.call('HSET', device_requests, replica, request)
return 1
