"""Take turns with the trainer on a shared device (docs/placement.md).

::

    granted ──▶ resume ──▶ generate, pull weights … ──▶ asked back at a rung ──▶ suspend ──▶ release
       ▲                                                                                        │
       └────────────────────────────────── request ─────────────────────────────────────────────┘

Groups in progress wait inside the engine. A pull is finished before the device is released.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

from services.rollout.engines.engine import SuspendableEngine
from shared.process.device import DeviceLease
from shared.process.telemetry import Status

log = logging.getLogger(__name__)

_EMPTY_FROM = 2


class Replica(Protocol):
    """The replica that takes turns."""

    async def evaluated(self) -> None:
        """Wait until the engine's version is not kept for an evaluation, before it is discarded."""

    def opened(self) -> None:
        """Take work, and pull the weights again if they were discarded."""


class DeviceTurns:
    """One replica's turns; on the event loop. ``lease`` is held at the start, and kept by its owner."""

    def __init__(self, lease: DeviceLease, engine: SuspendableEngine, status: Status) -> None:
        self._lease = lease
        self._engine = engine
        self._status = status
        self._open = asyncio.Event()
        self._open.set()
        self._pulling = asyncio.Lock()
        self._granted_s: float | None = None
        self._switch_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the device is ours."""
        return self._open.is_set()

    @contextlib.asynccontextmanager
    async def pulling(self) -> AsyncIterator[None]:
        """Pull weights while the device is ours."""
        while True:
            await self._open.wait()
            async with self._pulling:
                if self._open.is_set():
                    yield
                    self._note_switched()
                    return

    async def run(self, replica: Replica) -> None:
        """Take turns until cancelled.

        Raises:
            Fenced: another process was granted the device.
        """
        while True:
            await self._lease.acquire()
            self._granted_s, self._switch_s = time.perf_counter(), None
            await self._engine.resume()
            self._open.set()
            self._note_switched()
            replica.opened()
            rung = await self._lease.asked()
            if rung >= _EMPTY_FROM:
                await replica.evaluated()
            self._open.clear()
            async with self._pulling:
                await self._engine.suspend(rung)
            self._status.note_memory(self._engine.memory)
            await self._lease.confirm()
            await self._lease.release(self._switch_s)

    def _note_switched(self) -> None:
        if self._granted_s is not None and self._engine.version is not None:
            self._switch_s, self._granted_s = time.perf_counter() - self._granted_s, None
            self._status.values["switch_s"] = self._switch_s
