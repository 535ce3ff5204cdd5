#!lua flags=allow-oom
-- Write: one command on one key, also while the server is at its maxmemory.
-- KEYS: key
-- ARGV: command arguments...
-- Returns what the command returns.
return redis.call(command, key, unpack(arguments))
