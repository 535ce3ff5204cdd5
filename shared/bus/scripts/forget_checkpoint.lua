#!lua flags=allow-oom
-- Forget a checkpoint about to be deleted, for all its versions, unless one is pinned or the tip (a rollback's target).
-- KEYS: run checkpoints pins
-- ARGV: folder
-- Returns 1, or 0 if it must stay.
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
