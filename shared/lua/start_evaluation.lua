#!lua
-- Start an evaluation: write down what it is and publish its prompts, in one transaction; or do nothing when one is
-- under way or this version was evaluated before.
-- KEYS evaluation, evaluations, eval_prompts        ARGV version, description (JSON), payloads...
-- Returns 1, or 0 when nothing was done.
if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], 'version', ARGV[1], 'description', ARGV[2])
for i = 3, #ARGV do
  redis.call('XADD', KEYS[3], '*', 'id', string.format('%d', i - 3), 'data', ARGV[i])
end
return 1
