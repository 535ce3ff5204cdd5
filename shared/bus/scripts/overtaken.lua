#!lua flags=no-writes
-- Overtaken: whether a group admitted before a given one is still generated or scored.
-- KEYS: generating rollouts
-- ARGV: group_id
-- Returns 1 or 0. Entries are read few at a time: their payloads are large, and the oldest is mostly of the lowest id.
local function is_before(id)
  return (tonumber(id) or math.huge) < tonumber(group_id)
end
for _, id in ipairs(redis.call('HKEYS', generating)) do
  if is_before(id) then
    return 1
  end
end
local start = '-'
repeat
  local page = redis.call('XRANGE', rollouts, start, '+', 'COUNT', 8)
  for _, entry in ipairs(page) do
    if entry[2][1] == 'id' and is_before(entry[2][2]) then
      return 1
    end
    start = '(' .. entry[1]
  end
until #page < 8
return 0
