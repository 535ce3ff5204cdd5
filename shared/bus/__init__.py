"""The bus: Redis Streams and the run's keys. No other package uses Redis.

bus (streams)  ─┬─▶ client (commands, scripts) ─▶ Redis or Valkey
stores (keys)  ─┘
worker: take ─▶ handle ─▶ hand over           messages ─▶ encoding (MessagePack)
"""
