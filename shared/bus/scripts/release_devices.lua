#!lua flags=allow-oom
-- Release what a process holds of the devices, and withdraw its request.
-- KEYS: device_requests devices...
-- ARGV: replica process switch_ms
-- ``switch_ms``: what the switch to the phase that ends took, or "".
-- The end of a training turn deletes an earlier one, as the trainer has counted it.
-- Returns the number of devices released.
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local released = 0
for _, device in ipairs(devices) do
  local held = redis.call('HMGET', device, 'process', 'rung', 'phase', 'since_ms', 'asked_bytes')
  if held[1] == process then
    if held[3] == 'score' then
      redis.call('HINCRBY', device, 'score_turns', 1)
      redis.call('HINCRBY', device, 'score_ms', string.format('%.0f', math.max(0, now_ms - tonumber(held[4] or now_ms))))
    end
    if held[2] then
      redis.call('HSET', device, 'freed', held[2], 'offload_bytes', held[5] or '0')
    end
    redis.call('HDEL', device, 'replica', 'process', 'phase', 'rung')
    if switch_ms ~= '' then
      redis.call('HSET', device, 'switch_ms', switch_ms)
    elseif held[3] == 'train' then
      redis.call('HDEL', device, 'switch_ms')
    end
    released = released + 1
  end
end
local request = redis.call('HGET', device_requests, replica)
if request and string.sub(request, 1, #process) == process then
  redis.call('HDEL', device_requests, replica)
end
return released
