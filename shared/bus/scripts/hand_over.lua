#!lua flags=allow-oom
-- Hand over: publish the result and take the input off the stream. A part of a group goes into its assembly; the last one
-- publishes the group, as a MessagePack array of its prompt and its parts.
-- KEYS: input output generating assembly crashes causes
-- ARGV: group stream_name entry_id group_id part payload
-- `part`: its index, "all" for one part with all samples, "" for an entry without an assembly.
-- Returns 1, or 0 if another consumer finished this entry first, or its group has ended: this result is dropped.
if redis.call('XACK', input, group, entry_id) == 0 then
  return 0
end
redis.call('XDEL', input, entry_id)
redis.call('HDEL', crashes, stream_name .. ':' .. entry_id)
redis.call('HDEL', causes, stream_name .. ':' .. entry_id)
if part ~= '' then
  local index = part == 'all' and '0' or part
  if redis.call('HGET', assembly, '@' .. index) ~= entry_id then
    return 0
  end
  redis.call('HDEL', assembly, '@' .. index)
  redis.call('HSET', assembly, index, payload)
  if redis.call('HINCRBY', assembly, 'missing', -1) > 0 then
    return 1
  end
  if part ~= 'all' then
    local parts = tonumber(redis.call('HGET', assembly, 'parts'))
    local pieces = {struct.pack('>BI4', 0xdd, parts + 1)}
    for place = -1, parts - 1 do
      local piece = place < 0 and redis.call('HGET', generating, group_id) or redis.call('HGET', assembly, place)
      pieces[#pieces + 1] = struct.pack('>BI4', 0xc6, #piece)
      pieces[#pieces + 1] = piece
    end
    payload = table.concat(pieces)
  end
  redis.call('DEL', assembly)
  redis.call('HDEL', generating, group_id)
end
redis.call('XADD', output, '*', 'id', group_id, 'data', payload)
return 1
