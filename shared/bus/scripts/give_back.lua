#!lua flags=allow-oom
-- Give back: let any consumer take entries once they are idle long enough.
-- KEYS: stream leases
-- ARGV: group consumer idle_ms uncounted receiver entries...
-- A large `idle_ms` makes them available at once; `uncounted` attempts are subtracted; without `entries`: all of the
-- consumer, which keeps no lease.
-- Returns the number of entries given; 0 if the server lost its data.
local rows = {}
if #entries == 0 then
  redis.call('ZREM', leases, consumer)
  local start, page = '-', nil
  repeat
    page = redis.pcall('XPENDING', stream, group, start, '+', 1000, consumer)
    for _, row in ipairs(page) do  -- an error has no rows
      rows[#rows + 1] = row
      start = '(' .. row[1]
    end
  until #page < 1000
else
  for _, entry in ipairs(entries) do
    local found = redis.pcall('XPENDING', stream, group, entry, entry, 1)
    local row = not found.err and found[1]
    if row and row[2] == consumer then
      rows[#rows + 1] = row
    end
  end
end
for _, row in ipairs(rows) do
  local attempts = math.max(0, row[4] - tonumber(uncounted))
  redis.call('XCLAIM', stream, group, receiver, 0, row[1], 'IDLE', idle_ms, 'RETRYCOUNT', attempts, 'JUSTID')
end
return #rows
