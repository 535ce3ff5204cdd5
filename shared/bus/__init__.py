"""The bus: Redis Streams and the run's keys. No other package uses Redis.

bus (streams)  ─┬─▶ commands ─▶ server ─▶ connection ─▶ Redis or Valkey
stores (keys)  ─┘      └─▶ lua (scripts with named keys and arguments)
worker: take ─▶ handle ─▶ hand over           messages ─▶ wire (msgpack)
"""
