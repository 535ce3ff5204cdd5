"""Shelves of replicas that are played by the test's own process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, beat_once
from penstock.shared.peers.handshake import Secret
from penstock.shared.shelf.listener import Listener
from penstock.shared.shelf.shelf import Limits, Shelf
from penstock.shared.shelf.store import Store

SECRET = b"the run's"
_BEAT_S = 600.0
LIMITS = Limits(above_bytes=1, copies=2, lost_after_s=0.0)


async def beat(bus: Bus, replica: str, shelf: str, host: str, node: str = "") -> None:
    """Announce a replica and where its shelf is served."""
    now_s = time.time()
    given = Heartbeat("rollout", replica, "working", None, host, 1, "", now_s, now_s, 0, "", {}, shelf=shelf, node=node)
    await beat_once(bus, given, _BEAT_S)


@contextlib.asynccontextmanager
async def served(
    bus: Bus,
    folder: Path,
    replica: str,
    limits: Limits = LIMITS,
    *,
    most_bytes: int = 1 << 30,
    host: str = "other",
    node: str = "",
    secret: Secret = lambda: SECRET,
) -> AsyncIterator[Shelf]:
    """Yield the shelf of a replica that other processes reach."""
    store = Store(folder / replica, most_bytes)
    listener = Listener(store, replica, "127.0.0.1", secret)
    address = f"127.0.0.1:{listener.port}"
    serving = asyncio.create_task(listener.run())
    await beat(bus, replica, address, host, node)
    try:
        yield Shelf(bus, store, replica, secret, limits, address)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def reader(bus: Bus, folder: Path, limits: Limits = LIMITS, *, keeps: bool = False) -> Shelf:
    """Return the shelf of a process that serves none."""
    return Shelf(bus, Store(folder / "reader", 1 << 30), "reader", lambda: SECRET, limits, keeps=keeps)
