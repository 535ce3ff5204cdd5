#!lua flags=allow-oom
-- Requeue: take a stale experience off the stream and its group back to the prompts, an entry for each sample.
-- KEYS: input prompts counts generating assembly
-- ARGV: group entry_id group_id payload samples
-- Returns 1, or 0 if another consumer finished this entry first.
if redis.call('XACK', input, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', input, entry_id)
redis.call('HSET', generating, group_id, payload)
redis.call('HSET', assembly, 'parts', samples, 'missing', samples)
for part = 0, samples - 1 do
  redis.call('HSET', assembly, '@' .. part, redis.call('XADD', prompts, '*', 'id', group_id, 'part', part))
end
redis.call('HINCRBY', counts, 'requeued', 1)
return 1
