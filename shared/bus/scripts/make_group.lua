#!lua flags=allow-oom
-- Make a consumer group: of everything in a stream, which is made with it; or do nothing when it is there.
-- KEYS: stream
-- ARGV: group
local made = redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
  return made
end
return 1
