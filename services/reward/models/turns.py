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
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from penstock.services.reward.models.call_watch import CallWatch
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Purpose, RolloutGroup
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.streams import EVAL_ROLLOUTS, EXPERIENCE, ROLLOUTS
from penstock.shared.placement.lease import DeviceLease
from penstock.shared.process.telemetry import Status
from penstock.shared.settings.algorithm import AlgorithmSettings
from penstock.shared.tasks import beside

_LEAST_QUIET_S = 1.0
_QUIET_TURNS = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """Ids of the groups in flight."""

    coming: frozenset[int]
    """Generated now, or being scored."""
    scored: frozenset[int]
    """With the trainer."""
    shown: frozenset[int] = frozenset()
    """Demonstrations, with the trainer."""

    def after(self, turn: frozenset[int]) -> "Flight":
        """Return the groups once those of ``turn`` are scored."""
        return dataclasses.replace(self, coming=self.coming - turn, scored=self.scored | turn)

    def batches(self, groups: int, *, waits: bool) -> int:
        """Return how many batches of ``groups`` the trainer can make (``services/trainer/rank0/intake.py``).

        Demonstrations keep their places among the groups in flight. ``waits``: for groups admitted before those of its
        batch.

        >>> Flight(frozenset({0, 3}), frozenset({1, 2})).batches(2, waits=False)
        1
        >>> Flight(frozenset({0, 3}), frozenset({1, 2})).batches(2, waits=True)
        0
        >>> Flight(frozenset({0, 4}), frozenset({2}), frozenset({1, 3})).batches(3, waits=False)
        0
        """
        scored, shown = sorted(self.scored), sorted(self.shown)
        first_coming = min(self.coming, default=math.inf)
        made = 0
        while True:
            due = len(set(sorted({*self.coming, *scored, *shown})[:groups]) & set(shown))
            batch = [*shown[:due], *scored[: groups - due]]
            if len(batch) < groups or (waits and first_coming < max(batch)):
                return made
            shown, scored = shown[due:], scored[groups - due :]
            made += 1


def is_due(waiting: int, room: int, quiet_s: float, turn_s: float, *, completes: bool) -> bool:
    """Whether models should request their device, so that turns are few and no group waits forever.

    Args:
        waiting: groups that wait for models.
        room: groups that the service takes.
        quiet_s: seconds since the last group arrived.
        turn_s: measured cost of a turn, without its forward passes.
        completes: whether those that wait complete the next batch.

    >>> is_due(6, room=32, quiet_s=0.0, turn_s=0.5, completes=True)
    True
    >>> is_due(6, room=32, quiet_s=1.9, turn_s=0.5, completes=False)
    False
    >>> is_due(6, room=32, quiet_s=2.0, turn_s=0.5, completes=False)
    True
    """
    if not waiting:
        return False
    return completes or waiting >= room or quiet_s >= max(_LEAST_QUIET_S, _QUIET_TURNS * turn_s)


_LOOK_S = 0.1
_LINGER_S = 0.1
"""Groups of the bus whose texts are not tokenized yet arrive within this time."""
_LINGER_LOOK_S = 0.02


class Model(Protocol):
    """A model, as turns see it."""

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

    @contextlib.contextmanager
    def waiting(self, group: RolloutGroup) -> Iterator[None]:
        yield

    def note_moved(self, seconds: float) -> None:
        """Note the seconds in which a model was moved back to the device."""

    def ready_s(self) -> float:
        """Return when the device became ours, in monotonic seconds; the current time while it is not."""
        return 0.0


class ModelTurns(Turns):
    """Turns of all models of this process on a shared device; on the event loop.

    Args:
        lease: kept by its owner.
        algorithm: returns the current settings.
        room: groups that the service takes.
    """

    is_shared = True

    def __init__(
        self, lease: DeviceLease, bus: Bus, status: Status, algorithm: Callable[[], AlgorithmSettings], room: int
    ) -> None:
        super().__init__()
        self._lease = lease
        self._bus = bus
        self._status = status
        self._algorithm = algorithm
        self._room = room
        self._waiting: Counter[tuple[Purpose, int]] = Counter()
        """Models that each group waits for."""
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

    @contextlib.contextmanager
    def waiting(self, group: RolloutGroup) -> Iterator[None]:
        name = group.prompt.purpose, int(group.group_id)
        self._waiting[name] += 1
        self._arrived_s = time.monotonic()
        self._arrived.set()
        try:
            yield
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]

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
        async with beside(self._run()):
            yield

    async def _run(self) -> None:
        while True:
            await self._due()
            await self._turn()

    async def _due(self) -> None:
        while not self._loading:
            self._arrived.clear()
            if not self._waiting:
                await self._arrived.wait()
                continue
            waiting, completes = len(self._waiting), await self._completes()
            quiet_s = time.monotonic() - self._arrived_s
            if is_due(waiting, self._room, quiet_s, self._turn_s, completes=completes):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._arrived.wait()

    async def _completes(self) -> bool:
        """Whether the groups that wait complete a batch."""
        algorithm, waits = self._algorithm(), self._algorithm().on_stale == "wait"
        groups = algorithm.groups_per_step
        turn = frozenset(group_id for purpose, group_id in self._waiting if purpose is Purpose.TRAIN)
        if not turn:
            return False
        if not waits and not algorithm.imitation:
            scored = await self._bus.length(EXPERIENCE)
            return (scored + len(turn)) // groups > scored // groups
        flight = Flight(*await Ledger(self._bus).ids_in_flight())
        return flight.after(turn).batches(groups, waits=waits) > flight.batches(groups, waits=waits)

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
        self._turn_s = self._moved_s + now_s - leaves_s + 2 * self._lease.switch_s
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
