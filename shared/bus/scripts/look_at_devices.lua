#!lua flags=allow-oom
-- Read all requests and grants at one moment.
-- KEYS: device_requests devices...
-- Returns {requests as name, value, …; a row per device: replica, process, phase, term, rung, 1 if it lapsed or else 0;
-- or empty if it is free}.
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local rows = {}
for place, device in ipairs(devices) do
  local held = redis.call('HMGET', device, 'replica', 'process', 'phase', 'term', 'rung', 'until_ms')
  if held[2] then
    rows[place] = {held[1], held[2], held[3], held[4], held[5] or '-1', tonumber(held[6]) > now_ms and '0' or '1'}
  else
    rows[place] = {}
  end
end
return {redis.call('HGETALL', device_requests), rows}
