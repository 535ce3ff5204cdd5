#!lua flags=allow-oom
-- Requeue: take a stale experience, or a group whose payload is lost, off the stream and its group back to the stream of its prompt, an entry for each stale sample.
-- KEYS: input source counts generating assembly crashes causes payloads
-- ARGV: group stream_name entry_id group_id payload reason parts...
-- `reason`: what is counted; `parts`: each sample that is kept, encoded; "" for one to generate again.
-- Returns 1, or 0 if another consumer finished this entry first.
if redis.call('XACK', input, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', input, entry_id)
redis.call('HDEL', crashes, stream_name .. ':' .. entry_id)
redis.call('HDEL', causes, stream_name .. ':' .. entry_id)
redis.call('HDEL', payloads, stream_name .. ':' .. entry_id)
redis.call('HSET', generating, group_id, payload)
local missing = 0
for place, part in ipairs(parts) do
  local index = place - 1
  if part == '' then
    missing = missing + 1
    redis.call('HSET', assembly, '@' .. index, redis.call('XADD', source, '*', 'id', group_id, 'part', index))
  else
    redis.call('HSET', assembly, index, part)
  end
end
redis.call('HSET', assembly, 'parts', #parts, 'missing', missing)
redis.call('HINCRBY', counts, reason, 1)
return 1
