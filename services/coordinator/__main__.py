"""python -m penstock.services.coordinator --config run.toml

uvloop doubles the requests served (``benchmarks.bus.status``).
"""

from penstock.shared.process.importing import importing

with importing():
    import uvloop

    from penstock.services.coordinator.service import start
    from penstock.shared.process.service import leave, main

if __name__ == "__main__":
    leave(main("coordinator", start, loop=uvloop.new_event_loop))
