"""python -m services.coordinator --config run.toml

uvloop doubles the requests served (``benchmarks.bus.status``).
"""

import uvloop

from services.coordinator.service import start
from shared.process.service import leave, main

if __name__ == "__main__":
    leave(main("coordinator", start, loop=uvloop.new_event_loop))
