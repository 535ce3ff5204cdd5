#!lua flags=allow-oom
-- Renew a consumer's lease: until it ends, what the consumer holds is its own (`reclaim`).
-- KEYS: stream leases
-- ARGV: group consumer lease_ms
-- Returns the ids of all that it holds; none if the server lost its data.
local time = redis.call('TIME')
redis.call('ZADD', leases, time[1] * 1000 + math.floor(time[2] / 1000) + lease_ms, consumer)
local ours, start, page = {}, '-', nil
repeat
  page = redis.pcall('XPENDING', stream, group, start, '+', 1000, consumer)
  for _, row in ipairs(page) do  -- an error has no rows
    ours[#ours + 1] = row[1]
    start = '(' .. row[1]
  end
until #page < 1000
return ours
