#!lua flags=no-writes
-- Shelved: ids of the groups of which payloads may be needed: in flight, in the journal, or dead letters.
-- KEYS: run generating journal streams...
-- Returns {the run exists: 1 or 0, the ids}. Entries of `streams` are read few at a time: their payloads may be large.
local ids = redis.call('HKEYS', generating)
local function read(stream, count)
  local start = '-'
  repeat
    local page = redis.call('XRANGE', stream, start, '+', 'COUNT', count)
    for _, entry in ipairs(page) do
      for i = 1, #entry[2], 2 do
        if entry[2][i] == 'id' then ids[#ids + 1] = entry[2][i + 1] end
      end
      start = '(' .. entry[1]
    end
  until #page < count
end
read(journal, 1000)
for _, stream in ipairs(streams) do
  read(stream, 8)
end
return {redis.call('EXISTS', run), ids}
