#!lua flags=allow-oom
-- Requeue: take a stale experience off the stream and its group back to the prompts.
-- KEYS: input prompts counts
-- ARGV: group entry_id group_id payload
-- Returns 1, or 0 if another consumer finished this entry first.
if redis.call('XACK', input, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', input, entry_id)
redis.call('XADD', prompts, '*', 'id', group_id, 'data', payload)
redis.call('HINCRBY', counts, 'requeued', 1)
return 1
