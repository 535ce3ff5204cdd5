#!lua flags=no-writes
-- Shelved: which of some groups may need payloads: those in flight, in the journal, or among dead letters.
-- KEYS: run generating journal streams...
-- ARGV: groups...
-- `groups`: ids, each once. Returns {the run exists: 1 or 0, the ids of those}. Entries are read few at a time, as their payloads may be
-- large, also those of older releases in the journal, and no further than until all groups are known.
local unknown, ids, left = {}, {}, #groups
local function know(id)
  if unknown[id] then
    unknown[id] = nil
    ids[#ids + 1] = id
    left = left - 1
  end
end
for _, group in ipairs(groups) do
  unknown[group] = true
  if redis.call('HEXISTS', generating, group) == 1 then
    know(group)
  end
end
local function read(stream)
  local start = '-'
  while left > 0 do
    local page = redis.call('XRANGE', stream, start, '+', 'COUNT', 8)
    for _, entry in ipairs(page) do
      for i = 1, #entry[2], 2 do
        if entry[2][i] == 'id' then know(entry[2][i + 1]) end
      end
      start = '(' .. entry[1]
    end
    if #page < 8 then
      return
    end
  end
end
for _, stream in ipairs(streams) do
  read(stream)
end
read(journal)
return {redis.call('EXISTS', run), ids}
