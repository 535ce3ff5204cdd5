#!lua flags=allow-oom
-- Observe: add a group's values to running statistics (Welford), once; without values, only read.
-- KEYS: statistics groups
-- ARGV: group_id remembered values...
-- `remembered`: number of counted groups to remember.
-- Returns count, mean and sum of squared differences, as text.
local function number(name) return tonumber(redis.call('HGET', statistics, name) or '0') end
local count, mean, squares = number('count'), number('mean'), number('squares')
if #values > 0 and redis.call('ZADD', groups, 'NX', group_id, group_id) == 1 then
  for _, text in ipairs(values) do
    local value = tonumber(text)
    count = count + 1
    local off = value - mean
    mean = mean + off / count
    squares = squares + off * (value - mean)
  end
  redis.call('HSET', statistics, 'count', string.format('%.0f', count), 'mean', string.format('%.17g', mean),
    'squares', string.format('%.17g', squares))
  redis.call('ZREMRANGEBYRANK', groups, 0, -1 - tonumber(remembered))
end
return {string.format('%.0f', count), string.format('%.17g', mean), string.format('%.17g', squares)}
