#!lua flags=allow-oom
-- Requeue: send a group back to the prompts, in the transaction that takes its stale experience off the stream.
-- KEYS input, prompts, counts        ARGV group, entry id, group id, payload
-- Returns 1, or 0 when another consumer finished this entry first.
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  return 0
end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'id', ARGV[3], 'data', ARGV[4])
redis.call('HINCRBY', KEYS[3], 'requeued', 1)
return 1
