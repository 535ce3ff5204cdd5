"""Gauges of what may run out: the bus's memory, and the disk of the run's folder."""

import asyncio
import contextlib
import shutil
from pathlib import Path

from prometheus_client import Gauge

from penstock.shared.bus.bus import Bus

BUS_MEMORY = Gauge("penstock_coordinator_bus_memory_bytes", "Memory that the bus uses.")
BUS_MAXMEMORY = Gauge("penstock_coordinator_bus_maxmemory_bytes", "The bus's maxmemory; 0: no limit.")
DISK_FREE = Gauge("penstock_coordinator_disk_free_bytes", "Free space on the disk of the run's folder.")
DISK_SIZE = Gauge("penstock_coordinator_disk_size_bytes", "Size of the disk of the run's folder.")
_EVERY_S = 1.0


async def measure(bus: Bus, folder: Path) -> None:
    """Set the gauges until cancelled."""
    while True:
        used, most = await bus.memory_bytes()
        BUS_MEMORY.set(used)
        BUS_MAXMEMORY.set(most)
        with contextlib.suppress(OSError):
            disk = await asyncio.to_thread(shutil.disk_usage, folder)
            DISK_FREE.set(disk.free)
            DISK_SIZE.set(disk.total)
        await asyncio.sleep(_EVERY_S)
