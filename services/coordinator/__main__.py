"""python -m services.coordinator --config run.toml

On uvloop: it sends an answer's head and body at once, and serves twice the requests (``benchmarks.status``).
"""

import uvloop

from services.coordinator.service import start
from shared.process.service import leave, main

if __name__ == "__main__":
    leave(main("coordinator", start, loop=uvloop.new_event_loop))
