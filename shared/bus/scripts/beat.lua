#!lua flags=allow-oom
-- Beat: renew a replica's heartbeat, and tell the replica what it reads with each.
-- KEYS: heartbeat services orders revisions run_secret
-- ARGV: replica text ttl_ms
-- Returns {its order or nil, the newest revision of the settings or nil, the run's secret or nil}.
redis.call('SET', heartbeat, text, 'PX', ttl_ms)
redis.call('SADD', services, replica)
return {redis.call('HGET', orders, replica), redis.call('HGET', revisions, 'revision'), redis.call('GET', run_secret)}
