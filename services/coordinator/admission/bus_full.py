"""Admission's wait while the bus is at its ``maxmemory`` (docs/reference/bus.md, "A full bus")."""

import time

from prometheus_client import Gauge

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.process.telemetry import tell

BUS_FULL = Gauge(
    "penstock_coordinator_bus_full", "1 while admission waits because the bus is at its maxmemory, else 0."
)

SOURCE = "admission"
_LOOK_S = 0.5
_ROOM = 0.95
"""Share of maxmemory below which admission continues, against flapping."""


class Shortage:
    """Whether admission waits for memory; kept on the bus for the next leader."""

    def __init__(self, bus: Bus, ledger: Ledger) -> None:
        self._bus = bus
        self._ledger = ledger
        self._looked_s = 0.0
        self._active: bool | None = None
        """None: not read yet."""

    async def begin(self) -> None:
        used, most = await self._bus.memory_bytes()
        sentence = (
            f"admission waits for memory: the bus uses {used / 1e6:.1f} MB of its maxmemory of {most / 1e6:.1f} MB; "
            f"it continues below {_ROOM:.0%}: raise maxmemory (of `penstock up`: the memory of its machine or container), or lower algorithm.max_lag or trainer.checkpoint_every_steps"
        )
        self._active = True
        BUS_FULL.set(1)
        await self._ledger.set_bus_full(sentence)
        await tell(self._bus, SOURCE, "bus full", sentence, used_bytes=used, maxmemory_bytes=most)

    async def is_over(self) -> bool:
        if self._active is None:
            self._active = bool((await self._ledger.status()).bus_full)
        if not self._active:
            return True
        if time.monotonic() - self._looked_s < _LOOK_S:
            return False
        self._looked_s = time.monotonic()
        used, most = await self._bus.memory_bytes()
        if most and used > _ROOM * most:
            return False
        self._active = False
        BUS_FULL.set(0)
        await self._ledger.set_bus_full("")
        await tell(self._bus, SOURCE, "bus has room", f"the bus uses {used / 1e6:.1f} MB: admission continues")
        return True
