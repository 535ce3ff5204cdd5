#!lua flags=no-writes
-- Depths: how much lies in some streams, without moving any of it.
-- KEYS streams...        ARGV the consumer group of each ('': none)
-- Returns {entries, pending, id of the oldest entry or ''} for each, read at one moment.
local result = {}
for i, key in ipairs(KEYS) do
  local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  local pending = 0
  if ARGV[i] ~= '' then
    local summary = redis.pcall('XPENDING', key, ARGV[i])
    pending = summary.err and 0 or summary[1]
  end
  result[i] = {redis.call('XLEN', key), pending, oldest and oldest[1] or ''}
end
return result
