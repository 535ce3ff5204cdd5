#!lua flags=allow-oom
-- Give back: let any consumer take entries once their idle time is long enough.
-- KEYS stream
-- ARGV group, consumer, idle ms (large: at once), attempts that do not count, consumer to give to, entry ids... (none: all it has)
-- Returns how many were ours to give; none when the server came back empty.
local rows = {}
if #ARGV == 5 then
  local start, page = '-', nil
  repeat
    page = redis.pcall('XPENDING', KEYS[1], ARGV[1], start, '+', 1000, ARGV[2])
    for _, row in ipairs(page) do  -- an error has no rows
      rows[#rows + 1] = row
      start = '(' .. row[1]
    end
  until #page < 1000
else
  for i = 6, #ARGV do
    local found = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)
    local row = not found.err and found[1]
    if row and row[2] == ARGV[2] then
      rows[#rows + 1] = row
    end
  end
end
for _, row in ipairs(rows) do
  local attempts = math.max(0, row[4] - tonumber(ARGV[4]))
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, row[1], 'IDLE', ARGV[3], 'RETRYCOUNT', attempts, 'JUSTID')
end
return #rows
