#!lua flags=allow-oom
-- Observe: add a group's values to running statistics (Welford), once; without values, only look.
-- KEYS statistics, groups that were counted      ARGV group id, groups to remember, values...
-- Returns count, mean and sum of squared differences, as text.
local function number(name) return tonumber(redis.call('HGET', KEYS[1], name) or '0') end
local count, mean, squares = number('count'), number('mean'), number('squares')
if ARGV[3] and redis.call('ZADD', KEYS[2], 'NX', ARGV[1], ARGV[1]) == 1 then
  for i = 3, #ARGV do
    local value = tonumber(ARGV[i])
    count = count + 1
    local off = value - mean
    mean = mean + off / count
    squares = squares + off * (value - mean)
  end
  redis.call('HSET', KEYS[1], 'count', string.format('%.0f', count), 'mean', string.format('%.17g', mean),
    'squares', string.format('%.17g', squares))
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - tonumber(ARGV[2]))
end
return {string.format('%.0f', count), string.format('%.17g', mean), string.format('%.17g', squares)}
