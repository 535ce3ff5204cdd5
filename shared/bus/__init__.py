"""The bus: Redis Streams and the run's keys behind one package.

streams (the map) ─▶ bus ─▶ connection ─▶ Redis or Valkey
messages ─▶ wire (msgpack)      │
worker: take ─▶ handle ─▶ hand over    stores/: ledger, live settings, exports …
"""
