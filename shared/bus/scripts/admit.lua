#!lua
-- Admit: add prompts while there are free slots, and move the dataset cursor with them.
-- KEYS: run prompts rollouts experience
-- ARGV: slots groups_per_step steps expected_cursor expected_newest now_s term payloads...
-- `term` is that of the leader, or "" where nobody leads.
-- Returns how many were admitted; -1 when the run is not running, or another leads it; -2 when the cursor or the newest version is not as
-- expected (read them again). Group ids are the cursor's values, so no two admissions can share one.
local state = redis.call('HMGET', run, 'state', 'cursor', 'newest_version', 'step', 'leader_term')
if state[1] ~= 'running' or (term ~= '' and term ~= state[5]) then
  return -1
end
local cursor = tonumber(state[2] or '0')
if cursor ~= tonumber(expected_cursor) or (state[3] or '') ~= expected_newest then
  return -2
end
local in_flight = redis.call('XLEN', prompts) + redis.call('XLEN', rollouts) + redis.call('XLEN', experience)
local wanted = (tonumber(steps) - tonumber(state[4] or '0')) * tonumber(groups_per_step)
local room = math.min(tonumber(slots), wanted) - in_flight
local admitted = 0
for _, payload in ipairs(payloads) do
  if admitted >= room then
    break
  end
  redis.call('XADD', prompts, '*', 'id', string.format('%d', cursor + admitted), 'data', payload)
  admitted = admitted + 1
end
if admitted > 0 then
  redis.call('HSET', run, 'cursor', string.format('%d', cursor + admitted))
  redis.call('HSETNX', run, 'first_admission_s', now_s)
end
return admitted
