#!lua flags=allow-oom
-- Hand over: publish the result and take the input off the stream, or do nothing.
-- KEYS input, output        ARGV group, entry id, group id, payload
-- Returns 1, or 0 when another consumer finished this entry first: then this result is dropped.
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  return 0
end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'id', ARGV[3], 'data', ARGV[4])
return 1
