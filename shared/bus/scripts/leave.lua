#!lua flags=allow-oom
-- Leave: take an entry off its stream for good, counted, with its reason; or do nothing.
-- KEYS input, counts, audit, dead
-- ARGV group, entry id, group id, outcome, detail, attempts, keep (1: move it to the dead letters), audit length, counted (0|1)
-- Returns 1, or 0 when another consumer finished this entry first.
local kept = ARGV[7] == '1' and redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2]) or {}
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  return 0
end
redis.call('XDEL', KEYS[1], ARGV[2])
if ARGV[7] == '1' then
  local data = ''
  if kept[1] then
    local fields = kept[1][2]
    for i = 1, #fields, 2 do
      if fields[i] == 'data' then data = fields[i + 1] end
    end
  end
  redis.call('XADD', KEYS[4], '*', 'id', ARGV[3], 'data', data, 'reason', ARGV[5], 'attempts', ARGV[6], 'entry', ARGV[2])
end
if ARGV[9] == '1' then
  redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
  if tonumber(ARGV[8]) > 0 then
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[8], '*', 'id', ARGV[3], 'outcome', ARGV[4], 'detail', ARGV[5])
  end
end
return 1
