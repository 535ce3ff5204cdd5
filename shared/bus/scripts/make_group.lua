#!lua flags=allow-oom
-- Create a consumer group from the stream's beginning (and the stream), unless it exists.
-- KEYS: stream
-- ARGV: group
local made = redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
  return made
end
return 1
