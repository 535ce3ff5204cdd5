"""Turns of the trainer and of a replica on the devices that they share (docs/placement.md).

::

    replica   granted ──▶ resume ──▶ generate, pull weights … ──▶ asked back at a rung ──▶ suspend ──▶ release, request
    trainer   granted ──▶ train, snapshot, commit … ──▶ no batch is complete ──▶ free memory ──▶ release, request

Groups in progress wait inside the engine. A pull is finished before the device is released.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from penstock.shared.placement.lease import DeviceLease, lease_of, leased
from penstock.shared.process.service import Context
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from penstock.shared.settings.placement import REPLICA_RUNG, RUNGS


class Replica(Protocol):
    """The replica that takes turns."""

    async def evaluated(self) -> None:
        """Wait until the engine's version is not kept for an evaluation, before it is discarded."""

    def opened(self) -> None:
        """Take work, and pull the weights again if they were discarded."""


class Versioned(Protocol):
    """An engine with weights of a version."""

    @property
    def version(self) -> int | None:
        """The next token's version; None while there are no weights."""


class Suspendable(Versioned, Protocol):
    """An engine that frees its device's memory while another process uses it."""

    @property
    def memory(self) -> dict[str, float]:
        """Bytes held by component, before the last suspension."""

    async def suspend(self, rung: int) -> None:
        """Pause between two decoding steps; free the KV cache from rung 1 on, and the weights from rung 2 on.

        Without weights, ``version`` is None until the next swap.
        """

    async def resume(self) -> None:
        """Continue running requests, after the next swap if the weights were freed."""


class ReplicaTurns:
    """One replica's turns; on the event loop. ``lease`` is kept by its owner."""

    def __init__(self, lease: DeviceLease, status: Status) -> None:
        self._lease = lease
        self._status = status
        self._open = asyncio.Event()
        self._open.set()
        self._pulling = asyncio.Lock()
        self._granted_s: float | None = None
        self._switch_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def acquire(self, wait_s: float) -> bool:
        """Return whether the device was granted within ``wait_s``."""
        return await self._lease.acquire(wait_s)

    @contextlib.asynccontextmanager
    async def pulling(self, engine: Versioned) -> AsyncIterator[None]:
        """Pull weights while the device is ours."""
        while True:
            await self._open.wait()
            async with self._pulling:
                if self._open.is_set():
                    yield
                    self._note_switched(engine)
                    return

    async def run(self, replica: Replica, engine: Suspendable) -> None:
        """Take turns until cancelled, if the device is shared; it is held at the start.

        Raises:
            Fenced: another process was granted the device.
        """
        while self._lease.is_shared:
            await self._lease.acquire()
            self._granted_s, self._switch_s = time.perf_counter(), None
            await engine.resume()
            self._open.set()
            self._note_switched(engine)
            replica.opened()
            rung = await self._lease.asked()
            if rung >= REPLICA_RUNG:
                await replica.evaluated()
            self._open.clear()
            async with self._pulling:
                await engine.suspend(rung)
            self._status.note_memory(engine.memory)
            await self._lease.confirm()
            await self._lease.release(self._switch_s)

    def _note_switched(self, engine: Versioned) -> None:
        if self._granted_s is not None and engine.version is not None:
            self._switch_s, self._granted_s = time.perf_counter() - self._granted_s, None
            self._status.values["switch_s"] = self._switch_s


class TrainerTurns:
    """Rank 0's turns with all devices of the trainer; on the event loop. ``lease`` is kept by its owner."""

    def __init__(self, lease: DeviceLease, settings: Settings, status: Status) -> None:
        self._lease = lease
        self._settings = settings
        self._status = status
        self._moved_bytes = 0.0
        """To the host since the last step."""

    @property
    def may_end(self) -> bool:
        """Whether the devices are held, and others use them, too."""
        return self._lease.is_shared and self._lease.held

    @property
    def rung(self) -> int:
        """Of this turn on shared devices; 0 on own ones."""
        if not self._lease.is_shared:
            return 0
        chosen, seen = self._settings.placement.rung, self._lease.freed
        return chosen if chosen != "auto" else seen if seen >= 0 else RUNGS[-1]

    @property
    def offload_bytes(self) -> int | None:
        """Of optimizer states, to the host at rung 3 for the next phase; None: all, as the rung is forced."""
        return self._lease.offload_bytes if self._settings.placement.rung == "auto" else None

    @property
    def absent_bytes(self) -> float:
        """Of the snapshot, if it was away during the step: the coordinator chooses rungs by a step's peak with it."""
        freed = self._settings.frees_snapshots and self.rung >= REPLICA_RUNG
        return self._status.values.get("memory_snapshot", 0.0) if freed else 0.0

    async def acquire(self, wait_s: float) -> bool:
        """Return whether all devices were granted within ``wait_s``."""
        return await self._lease.acquire(wait_s)

    async def confirm(self) -> None:
        """Raises Fenced: another process was granted a device."""
        await self._lease.confirm()

    async def end(self, memory: Mapping[str, float], moved_bytes: float) -> None:
        """End the turn: ``memory`` was held by component and is free, and ``moved_bytes`` of it are in the host's."""
        self._moved_bytes += moved_bytes
        self._status.note_memory(memory)
        await self._lease.release()

    def take_figures(self) -> dict[str, float]:
        """Return figures of the switches since the last call."""
        figures = self._lease.take_switches()
        if self._lease.is_shared:
            figures["switch_moved_bytes"], self._moved_bytes = self._moved_bytes, 0.0
        return figures


@contextlib.asynccontextmanager
async def replica_turns(context: Context) -> AsyncIterator[ReplicaTurns]:
    """Yield the turns of the replica of ``context``. Raises SettingsError: no devices belong to its name."""
    async with leased(lease_of(context, "generate")) as lease:
        yield ReplicaTurns(lease, context.status)


@contextlib.asynccontextmanager
async def trainer_turns(context: Context) -> AsyncIterator[TrainerTurns]:
    """Yield rank 0's turns. Its last one ends with the process: to free the memory first could take longer than a stop
    may.
    """
    async with leased(lease_of(context, "train"), until_the_end=True) as lease:
        yield TrainerTurns(lease, context.settings, context.status)
