#!lua flags=allow-oom
-- Requeue: send a group back to the prompts, in the transaction that takes its stale experience off the stream.
-- KEYS: input prompts counts
-- ARGV: group entry_id group_id payload
-- Returns 1, or 0 when another consumer finished this entry first.
if redis.call('XACK', input, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', input, entry_id)
redis.call('XADD', prompts, '*', 'id', group_id, 'data', payload)
redis.call('HINCRBY', counts, 'requeued', 1)
return 1
