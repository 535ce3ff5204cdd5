#!lua flags=allow-oom
-- Trim the journal, oldest entries first, with the payloads of their groups.
-- KEYS: journal payloads
-- ARGV: through count
-- `through`: the last entry to go; `count`: how many may go at once, as the server does nothing else meanwhile.
-- Returns how many went.
local page = redis.call('XRANGE', journal, '-', through, 'COUNT', count)
for _, row in ipairs(page) do
  for i = 1, #row[2], 2 do
    if row[2][i] == 'entry' then
      redis.call('HDEL', payloads, 'experience:' .. row[2][i + 1])
    end
  end
  redis.call('XDEL', journal, row[1])
end
return #page
