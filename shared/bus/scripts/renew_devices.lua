#!lua flags=allow-oom
-- Renew a process's grant, or learn that it was given one. A lapsed grant is renewed if no other followed it.
-- KEYS: devices...
-- ARGV: process ttl_ms
-- Returns {the term, or 0 if the process does not hold every device; the rung at which they are asked back, or -1;
-- milliseconds of the longest switch to generation since training, or 0; the highest rung
-- of the last releases on request, or -1; turns of reward models so far, and their milliseconds; the most bytes
-- that the trainer has to move to the host at rung 3, as of those releases}.
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local term, rung, switch_ms, freed, score_turns, score_ms, offload = 0, -1, 0, -1, 0, 0, 0
for _, device in ipairs(devices) do
  local held = redis.call('HMGET', device, 'process', 'term', 'rung', 'switch_ms', 'freed', 'score_turns',
    'score_ms', 'offload_bytes')
  if held[1] ~= process then
    return {0, -1, 0, -1, 0, 0, 0}
  end
  term = tonumber(held[2])
  rung = math.max(rung, tonumber(held[3] or '-1'))
  switch_ms = math.max(switch_ms, tonumber(held[4] or '0'))
  freed = math.max(freed, tonumber(held[5] or '-1'))
  score_turns = score_turns + tonumber(held[6] or '0')
  score_ms = score_ms + tonumber(held[7] or '0')
  offload = math.max(offload, tonumber(held[8] or '0'))
end
for _, device in ipairs(devices) do
  redis.call('HSET', device, 'until_ms', string.format('%.0f', now_ms + tonumber(ttl_ms)))
end
return {term, rung, switch_ms, freed, score_turns, score_ms, offload}
