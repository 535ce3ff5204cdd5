#!lua
-- Start an evaluation: write down what it is and who keeps its version, and publish its prompts, in one transaction; or do
-- nothing when one is under way, this version was evaluated before, or a newer one is the head already: replicas may have left it.
-- KEYS evaluation, evaluations, eval_prompts, run        ARGV version, description (JSON), holding (JSON), payloads...
-- Returns 1, or 0 when nothing was done.
if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  return 0
end
local head = redis.call('HGET', KEYS[4], 'head')
if head and tonumber(head) > tonumber(ARGV[1]) then
  return 0
end
redis.call('HSET', KEYS[1], 'version', ARGV[1], 'description', ARGV[2], 'holding', ARGV[3])
for i = 4, #ARGV do
  redis.call('XADD', KEYS[3], '*', 'id', string.format('%d', i - 4), 'data', ARGV[i])
end
return 1
