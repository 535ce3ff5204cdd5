"""Take turns with the trainer on a shared device (docs/placement.md).

::

    granted ──▶ resume ──▶ generate, pull weights … ──▶ asked back at a rung ──▶ suspend ──▶ release
       ▲                                                                                        │
       └────────────────────────────────── request ─────────────────────────────────────────────┘

Groups in progress wait inside the engine. A pull is finished before the device is released. A guest
(``placement.mode = "lend"``) takes prompts only while the device is its own, and hands back what is stale before it ends:
the other replicas generate it again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from services.rollout.engines.engine import SuspendableEngine
from shared.process.device import DeviceLease
from shared.process.telemetry import Status

log = logging.getLogger(__name__)

_EMPTY_FROM = 2
_LOOK_S = 0.5


class Replica(Protocol):
    """The replica that takes turns."""

    @property
    def newest_step(self) -> int:
        """The newest step that the replica knows of."""

    @property
    def generated(self) -> tuple[int, int]:
        """Samples and tokens finished so far."""

    async def evaluated(self) -> None:
        """Wait until the engine's version is not kept for an evaluation, before it is discarded."""

    def opened(self) -> None:
        """Take work, and pull the weights again if they were discarded."""

    def closed(self) -> None:
        """Take no more work, if it is a guest."""

    async def hand_back(self) -> None:
        """Return what is held to the bus."""


class DeviceTurns:
    """One replica's turns; on the event loop.

    Args:
        lease: held at the start, and kept by its owner.
        max_lag: returns ``algorithm.max_lag``, which may change; None: it is not a guest.
    """

    def __init__(
        self, lease: DeviceLease, engine: SuspendableEngine, status: Status, *, max_lag: Callable[[], int] | None = None
    ) -> None:
        self.max_lag = max_lag
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
        away_since = replica.newest_step
        while True:
            while not await self._lease.acquire(_LOOK_S):
                if self.max_lag is not None and replica.newest_step - away_since > self.max_lag():
                    await replica.hand_back()
            self._granted_s, self._switch_s = time.perf_counter(), None
            samples, tokens = replica.generated
            await self._engine.resume()
            self._open.set()
            self._note_switched()
            replica.opened()
            rung = await self._lease.asked()
            if rung >= _EMPTY_FROM:
                await replica.evaluated()
            switch_s = await self._suspend(replica, rung)
            away_since = replica.newest_step
            await self._lease.confirm()
            await self._lease.release(switch_s, (replica.generated[0] - samples, replica.generated[1] - tokens))

    async def _suspend(self, replica: Replica, rung: int) -> float | None:
        """Free the device; return the seconds of the switch to generation, for a guest of both switches."""
        asked_s = time.perf_counter()
        self._open.clear()
        replica.closed()
        async with self._pulling:
            await self._engine.suspend(rung)
        self._status.note_memory(self._engine.memory)
        if self.max_lag is None:
            return self._switch_s
        there_s = self._switch_s if self._granted_s is None else asked_s - self._granted_s
        return (there_s or 0.0) + time.perf_counter() - asked_s

    def _note_switched(self) -> None:
        if self._granted_s is not None and self._engine.version is not None:
            self._switch_s, self._granted_s = time.perf_counter() - self._granted_s, None
            self._status.values["switch_s"] = self._switch_s
