#!lua
-- Admit prompts into free slots and advance the dataset cursor.
-- KEYS: run prompts rollouts experience
-- ARGV: slots groups_per_step steps expected_cursor expected_newest now_s term payloads...
-- `term`: the leader's, or "" without a leader.
-- Returns the number admitted; -1 if the run is not running or another leads it; -2 if the cursor or the newest version
-- is not as expected (read again). Group ids are cursor values, so no two admissions share one.
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
