#!lua
-- Start an evaluation: write its description and holding, and publish its prompts, unless one is under way, this
-- version was evaluated before, or a newer one is the head.
-- KEYS: evaluation evaluations source run holds
-- ARGV: version description holding payloads...
-- Returns 1, or 0 if nothing was done.
if redis.call('EXISTS', evaluation) == 1 or redis.call('HEXISTS', evaluations, version) == 1 then
  return 0
end
local head = redis.call('HGET', run, 'head')
if head and tonumber(head) > tonumber(version) then
  return 0
end
redis.call('HSET', evaluation, 'version', version, 'description', description, 'holding', holding)
redis.call('XADD', holds, 'MAXLEN', '~', 16, '*', 'id', version)
for i, payload in ipairs(payloads) do
  redis.call('XADD', source, '*', 'id', string.format('%d', i - 1), 'data', payload)
end
return 1
