#!lua flags=allow-oom
-- Take the next epoch, for a trainer that looks for payloads in `payloads` (`hand_over`).
-- KEYS: run
-- Returns the epoch.
local epoch = redis.call('HINCRBY', run, 'trainer_epoch', 1)
redis.call('HSET', run, 'payloads_epoch', epoch)
return epoch
