#!lua flags=no-writes
-- Earlier: how many groups admitted before each of some are still generated or scored.
-- KEYS: generating rollouts
-- ARGV: groups...
-- `groups`: ids. Returns a number for each. Entries are read few at a time: their payloads are large.
local counts = {}
for place = 1, #groups do
  counts[place] = 0
end
local function count(id)
  for place, group in ipairs(groups) do
    if (tonumber(id) or math.huge) < tonumber(group) then
      counts[place] = counts[place] + 1
    end
  end
end
for _, id in ipairs(redis.call('HKEYS', generating)) do
  count(id)
end
local start = '-'
repeat
  local page = redis.call('XRANGE', rollouts, start, '+', 'COUNT', 8)
  for _, entry in ipairs(page) do
    if entry[2][1] == 'id' then
      count(entry[2][2])
    end
    start = '(' .. entry[1]
  end
until #page < 8
return counts
