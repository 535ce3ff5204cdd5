"""The bus: Redis Streams and the run's keys behind one package. Nothing outside of it speaks Redis.

bus (streams)  ─┬─▶ commands ─▶ server ─▶ connection ─▶ Redis or Valkey
stores (keys)  ─┘      └─▶ lua (scripts with named keys and arguments)
worker: take ─▶ handle ─▶ hand over           messages ─▶ wire (msgpack)
"""
