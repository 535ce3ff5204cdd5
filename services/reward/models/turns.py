"""When models have their device: always, or in turn with the trainer and a replica (docs/placement.md).

::

    groups wait ──▶ a turn is due ──▶ request ──▶ granted ──▶ restore, compute … ──▶ no work waits, or asked back
        ▲                                                                                   │
        └────────────── release ◀── offload every model ◀── forward passes end ◀────────────┘

Models are loaded in a turn, too. Imports no model library.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from services.reward.models.call_watch import CallWatch
from shared.bus.bus import Bus
from shared.bus.streams import EVAL_ROLLOUTS, EXPERIENCE, ROLLOUTS
from shared.process.device import DeviceLease
from shared.process.telemetry import Status

_LOOK_S = 0.1
_LINGER_S = 0.1
"""Groups of the bus whose texts are not tokenized yet arrive within this time."""
_LINGER_LOOK_S = 0.02
_LEAST_QUIET_S = 1.0
_QUIET_TURNS = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class Backlog:
    """Numbers of groups."""

    waiting: int
    """Those that wait for models."""
    unscored: int
    """Generated for training, but not scored."""
    scored: int
    """With the trainer, which first trains complete batches."""


def is_due(backlog: Backlog, groups: int, room: int, quiet_s: float, turn_s: float) -> bool:
    """Whether models should request their device.

    So that turns are few and no group waits forever: once the groups that wait complete the next batch, or the service
    can take no more, or none has arrived for a multiple of what a turn costs.

    Args:
        groups: of a batch.
        room: groups that the service takes.
        quiet_s: seconds since the last group arrived.
        turn_s: measured cost of a turn, without its forward passes.

    >>> is_due(Backlog(6, 6, scored=2), groups=8, room=32, quiet_s=0.0, turn_s=0.5)
    True
    >>> is_due(Backlog(5, 5, scored=2), groups=8, room=32, quiet_s=1.9, turn_s=0.5)
    False
    >>> is_due(Backlog(5, 5, scored=2), groups=8, room=32, quiet_s=2.0, turn_s=0.5)
    True
    """
    if not backlog.waiting:
        return False
    training = min(backlog.waiting, backlog.unscored)  # the others are evaluated
    is_complete = training > 0 and backlog.scored % groups + training >= groups
    return is_complete or backlog.waiting >= room or quiet_s >= max(_LEAST_QUIET_S, _QUIET_TURNS * turn_s)


class Model(Protocol):
    """A model with its waiting work, as turns see it."""

    @property
    def calls(self) -> int:
        """Groups that wait for it, or are computed."""

    async def leave(self) -> None:
        """Free the device until the next computation."""


class Turns:
    """Models that have their device for themselves."""

    is_shared = False
    """Whether models have the device in turn with others."""

    def __init__(self) -> None:
        self.watch = CallWatch()
        """Watches the models' calls."""
        self.on_memory: Callable[[str, float], None] = lambda phase, seconds: None
        """Called at the end of a phase of a turn with its name and seconds, to note memory."""

    @contextlib.asynccontextmanager
    async def loading(self, model: str) -> AsyncIterator[None]:
        """Load ``model`` while the device is ours."""
        with self.watch.loading(model):
            yield

    @contextlib.asynccontextmanager
    async def computing(self) -> AsyncIterator[None]:
        """Run a forward pass while the device is ours."""
        yield

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take turns during the body."""
        yield

    def join(self, model: Model) -> None:
        """Let ``model`` take part."""

    def note_arrival(self) -> None:
        """Note that a group waits for a model."""

    def note_moved(self, seconds: float) -> None:
        """Note the seconds in which a model was moved back to the device."""

    def ready_s(self) -> float:
        """Return when the device became ours, in monotonic seconds; the current time while it is not."""
        return 0.0


class DeviceTurns(Turns):
    """Turns of all models of this process on a shared device; on the event loop.

    Args:
        lease: kept by its owner.
        groups: returns the number of groups of a batch.
        room: groups that the service takes.
    """

    is_shared = True

    def __init__(self, lease: DeviceLease, bus: Bus, status: Status, groups: Callable[[], int], room: int) -> None:
        super().__init__()
        self._lease = lease
        self._bus = bus
        self._status = status
        self._groups = groups
        self._room = room
        self._models: list[Model] = []
        self._loading = self._computing = 0
        self._open, self._arrived, self._still = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._still.set()
        self._opened_s = self._arrived_s = time.monotonic()
        self._moved_s = self._turn_s = 0.0

    @contextlib.asynccontextmanager
    async def loading(self, model: str) -> AsyncIterator[None]:
        self._loading += 1
        self._status.start.begin("waiting for the device")
        self._arrived.set()
        try:
            async with self.computing(), super().loading(model):
                self._status.start.begin("loading the models")
                yield
        finally:
            self._loading -= 1

    @contextlib.asynccontextmanager
    async def computing(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._computing += 1
        self._still.clear()
        try:
            yield
        finally:
            self._computing -= 1
            if not self._computing:
                self._still.set()

    def join(self, model: Model) -> None:
        self._models.append(model)

    def note_arrival(self) -> None:
        self._arrived_s = time.monotonic()
        self._arrived.set()

    def note_moved(self, seconds: float) -> None:
        self._moved_s += seconds

    def ready_s(self) -> float:
        return self._opened_s if self._open.is_set() else time.monotonic()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take turns during the body.

        Raises:
            Fenced: another process was granted the device.
        """
        async with asyncio.TaskGroup() as tasks:
            turns = tasks.create_task(self._run())
            try:
                yield
            finally:
                turns.cancel()

    async def _run(self) -> None:
        while True:
            await self._due()
            await self._turn()

    @property
    def _waiting(self) -> int:
        return max((model.calls for model in self._models), default=0)

    async def _due(self) -> None:
        while not self._loading:
            self._arrived.clear()
            if not self._waiting:
                await self._arrived.wait()
                continue
            unscored, scored = [await self._bus.length(stream) for stream in (ROLLOUTS, EXPERIENCE)]
            backlog, quiet_s = Backlog(self._waiting, unscored, scored), time.monotonic() - self._arrived_s
            if is_due(backlog, self._groups(), self._room, quiet_s, self._turn_s):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._arrived.wait()

    async def _turn(self) -> None:
        await self._lease.acquire()
        self._opened_s, self._moved_s = time.monotonic(), 0.0
        self._open.set()
        waits = [asyncio.ensure_future(self._lease.asked()), asyncio.ensure_future(self._over())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._open.clear()
        await self._still.wait()
        leaves_s = time.monotonic()
        self.on_memory("score", leaves_s - self._opened_s)
        for model in self._models:
            await model.leave()
        now_s = time.monotonic()
        self.on_memory("wait", now_s - leaves_s)
        self._turn_s = self._moved_s + now_s - leaves_s + 2 * (self._lease.switch_s or 0.0)
        await self._lease.confirm()
        await self._lease.release()

    async def _over(self) -> None:
        """Wait until no work waits, nor is about to."""
        idle_since_s = math.inf
        while True:
            groups = sum([await self._bus.length(stream) for stream in (ROLLOUTS, EVAL_ROLLOUTS)])
            now_s = time.monotonic()
            if self._loading or self._waiting:
                idle_since_s = math.inf
            elif not groups or now_s - idle_since_s >= _LINGER_S:
                return
            else:
                idle_since_s = min(idle_since_s, now_s)
            await asyncio.sleep(_LINGER_LOOK_S)
