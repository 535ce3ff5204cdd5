#!lua flags=allow-oom
-- Hand over: publish the result and take the input off the stream. A part of a group goes into its assembly; the last one
-- publishes the group, as a MessagePack array of its prompt and its parts. A sample without a result is lost: the group is
-- made of the others.
-- KEYS: input output generating assembly crashes causes counts audit run payloads
-- ARGV: group stream_name group_id payload cause audit_entries output_name entries...
-- `payload`: "" for a sample that is lost, for `cause`.
-- `entries`: part and id of each entry that `payload` is the result of. A part is a sample's index, "all" for one part with
-- all samples, "" for an entry without an assembly. Several are samples of one group, handed over together or not at all.
-- The payload of an entry of `experience` is in `payloads`, so that a commit moves none, if the trainer looks there: if it
-- is not of an older release, which takes its epoch without saying so.
-- Returns 1, or 0 if another consumer finished one of them first, or its group has ended: this result is dropped; -1 if
-- fewer than half of the group's samples, or than two, would be left: nothing is changed.
local part = entries[1]
local ids, fields, notes = {}, {}, {}
for i = 1, #entries, 2 do
  ids[#ids + 1] = entries[i + 1]
  fields[#fields + 1] = '@' .. (entries[i] == 'all' and '0' or entries[i])
  notes[#notes + 1] = stream_name .. ':' .. entries[i + 1]
end
local ours = true
if part ~= '' then
  for i, entry in ipairs(redis.call('HMGET', assembly, unpack(fields))) do
    ours = ours and entry == ids[i]
  end
end
if ours and payload == '' then
  local parts, lost = unpack(redis.call('HMGET', assembly, 'parts', 'lost'))
  if parts - (lost or 0) - 1 < math.max(2, parts / 2) then
    return -1
  end
end
if (#ids > 1 and not ours) or redis.call('XACK', input, group, unpack(ids)) == 0 then
  return 0
end
redis.call('XDEL', input, unpack(ids))
redis.call('HDEL', crashes, unpack(notes))
redis.call('HDEL', causes, unpack(notes))
if not ours then
  return 0
end
if part ~= '' then
  redis.call('HDEL', assembly, unpack(fields))
  if payload ~= '' then
    redis.call('HSET', assembly, fields[1]:sub(2), payload)
  else
    redis.call('HINCRBY', assembly, 'lost', 1)
    redis.call('HINCRBY', counts, 'lost_samples', 1)
    if tonumber(audit_entries) > 0 then
      redis.call('XADD', audit, 'MAXLEN', '~', audit_entries, '*', 'id', group_id, 'outcome', 'lost_sample', 'detail', cause)
    end
  end
  if redis.call('HINCRBY', assembly, 'missing', -#ids) > 0 then
    return 1
  end
  if part ~= 'all' then
    local pieces = {redis.call('HGET', generating, group_id)}
    local held = redis.call('HGETALL', assembly)
    for i = 1, #held, 2 do
      if tonumber(held[i]) then
        pieces[#pieces + 1] = held[i + 1]
      end
    end
    local written = {struct.pack('>BI4', 0xdd, #pieces)}
    for _, piece in ipairs(pieces) do
      written[#written + 1] = struct.pack('>BI4', 0xc6, #piece)
      written[#written + 1] = piece
    end
    payload = table.concat(written)
  end
  redis.call('DEL', assembly)
  redis.call('HDEL', generating, group_id)
end
local apart = false
if output_name == 'experience' then
  local epochs = redis.call('HMGET', run, 'trainer_epoch', 'payloads_epoch')
  apart = epochs[1] and epochs[1] == epochs[2]
end
local entry = redis.call('XADD', output, '*', 'id', group_id, 'data', apart and '' or payload)
if apart then
  redis.call('HSET', payloads, 'experience:' .. entry, payload)
end
return 1
