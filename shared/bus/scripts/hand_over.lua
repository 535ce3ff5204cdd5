#!lua flags=allow-oom
-- Hand over: publish the result and take the input off the stream.
-- KEYS: input output
-- ARGV: group entry_id group_id payload
-- Returns 1, or 0 if another consumer finished this entry first: this result is dropped.
if redis.call('XACK', input, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', input, entry_id)
redis.call('XADD', output, '*', 'id', group_id, 'data', payload)
return 1
