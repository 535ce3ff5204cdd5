#!lua flags=allow-oom
-- Forget a checkpoint that is about to be deleted, under whatever versions it is known; or do nothing when one of them is
-- pinned, or the tip: a rollback goes back to it.
-- KEYS: run checkpoints pins
-- ARGV: folder
-- Returns 1, or 0 when it has to stay.
local tip = redis.call('HGET', run, 'tip')
local known = redis.call('HGETALL', checkpoints)
local versions = {}
for i = 1, #known, 2 do
  if known[i + 1] == folder then
    if known[i] == tip or redis.call('SISMEMBER', pins, known[i]) == 1 then
      return 0
    end
    versions[#versions + 1] = known[i]
  end
end
for _, version in ipairs(versions) do
  redis.call('HDEL', checkpoints, version)
end
return 1
