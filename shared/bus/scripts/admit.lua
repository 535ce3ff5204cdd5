#!lua
-- Admit: add prompts while there are free slots, and move the dataset cursor with them.
-- KEYS run, prompts, rollouts, experience
-- ARGV slots, groups per step, total steps, expected cursor, expected newest version, now, leader's term or "", payloads...
-- Returns how many were admitted; -1 when the run is not running, or another leads it; -2 when the cursor or the newest version is not as
-- expected (read them again). Group ids are the cursor's values, so no two admissions can share one.
local state = redis.call('HMGET', KEYS[1], 'state', 'cursor', 'newest_version', 'step', 'leader_term')
if state[1] ~= 'running' or (ARGV[7] ~= '' and ARGV[7] ~= state[5]) then
  return -1
end
local cursor = tonumber(state[2] or '0')
if cursor ~= tonumber(ARGV[4]) or (state[3] or '') ~= ARGV[5] then
  return -2
end
local in_flight = redis.call('XLEN', KEYS[2]) + redis.call('XLEN', KEYS[3]) + redis.call('XLEN', KEYS[4])
local wanted = (tonumber(ARGV[3]) - tonumber(state[4] or '0')) * tonumber(ARGV[2])
local room = math.min(tonumber(ARGV[1]), wanted) - in_flight
local admitted = 0
for i = 8, #ARGV do
  if admitted >= room then
    break
  end
  redis.call('XADD', KEYS[2], '*', 'id', string.format('%d', cursor + admitted), 'data', ARGV[i])
  admitted = admitted + 1
end
if admitted > 0 then
  redis.call('HSET', KEYS[1], 'cursor', string.format('%d', cursor + admitted))
  redis.call('HSETNX', KEYS[1], 'first_admission_s', ARGV[6])
end
return admitted
