#!lua flags=allow-oom
-- Write: one command on one key, also at the server's maxmemory.
-- KEYS: key
-- ARGV: command arguments...
-- Returns the command's answer.
return redis.call(command, key, unpack(arguments))
