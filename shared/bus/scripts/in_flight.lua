#!lua flags=no-writes
-- In flight: ids of the groups that are generated or scored, of those with the trainer, and of demonstrations with it.
-- KEYS: generating rollouts experience
-- Returns the three lists. Entries are read few at a time: their payloads are large.
local coming, scored, shown = redis.call('HKEYS', generating), {}, {}
local function read(stream, drawn)
  local start = '-'
  repeat
    local page = redis.call('XRANGE', stream, start, '+', 'COUNT', 8)
    for _, entry in ipairs(page) do
      local fields = entry[2]
      local ids = fields[5] == 'shown' and shown or drawn
      if fields[1] == 'id' and string.match(fields[2], '^%d+$') then
        ids[#ids + 1] = fields[2]
      end
      start = '(' .. entry[1]
    end
  until #page < 8
end
read(rollouts, coming)
read(experience, scored)
return {coming, scored, shown}
