#!lua
-- Admit groups into free slots and advance the dataset cursor: an entry on `prompts` or `episodes` for each sample.
-- Demonstrations are experience from the start.
-- KEYS: run prompts episodes rollouts experience generating payloads assemblies...
-- ARGV: slots groups_per_step steps expected_cursor expected_newest now_s term samples kinds groups...
-- `assemblies`: those of the groups, in order; `samples`: entries per prompt, 0 for one entry with all samples; `kinds`: a
-- character for each group: `d` for a demonstration, `e` for an environment, else `p`; `term`: the leader's, or "" without a leader.
-- Returns the number admitted; -1 if the run is not running or another leads it; -2 if the cursor or the newest version
-- is not as expected (read again). Group ids are cursor values, so no two admissions share one.
local state = redis.call('HMGET', run, 'state', 'cursor', 'newest_version', 'step', 'leader_term', 'trainer_epoch', 'payloads_epoch')
if state[1] ~= 'running' or (term ~= '' and term ~= state[5]) then
  return -1
end
local cursor = tonumber(state[2] or '0')
if cursor ~= tonumber(expected_cursor) or (state[3] or '') ~= expected_newest then
  return -2
end
local in_flight = redis.call('HLEN', generating) + redis.call('XLEN', rollouts) + redis.call('XLEN', experience)
local wanted = (tonumber(steps) - tonumber(state[4] or '0')) * tonumber(groups_per_step)
local room = math.min(tonumber(slots), wanted) - in_flight
local admitted = 0
for i, payload in ipairs(groups) do
  if admitted >= room then
    break
  end
  local id = string.format('%d', cursor + admitted)
  local kind = kinds:sub(i, i)
  if kind == 'd' then
    local apart = state[6] and state[6] == state[7]  -- as in `hand_over`
    local entry = redis.call('XADD', experience, '*', 'id', id, 'data', apart and '' or payload, 'shown', '1')
    if apart then
      redis.call('HSET', payloads, 'experience:' .. entry, payload)
    end
  else
    local parts = math.max(1, tonumber(samples))
    redis.call('HSET', generating, id, payload)
    redis.call('HSET', assemblies[i], 'parts', parts, 'missing', parts)
    local source = kind == 'e' and episodes or prompts
    for part = 0, parts - 1 do
      local entry = redis.call('XADD', source, '*', 'id', id, 'part', samples == '0' and 'all' or part)
      redis.call('HSET', assemblies[i], '@' .. part, entry)
    end
  end
  admitted = admitted + 1
end
if admitted > 0 then
  redis.call('HSET', run, 'cursor', string.format('%d', cursor + admitted))
  redis.call('HSETNX', run, 'first_admission_s', now_s)
end
return admitted
