"""Share slots fairly: the programs with the least debt run; others wait, or are suspended (docs/sandbox.md, "Slots").

A program stays on its first core, so that neighbours' threads cost it no time.
"""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import itertools
import math
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

from prometheus_client import Gauge

WAITING = Gauge("penstock_executor_queue_programs", "Programs that wait for a slot.")
IN_PROGRESS = Gauge("penstock_executor_programs_in_progress", "Programs that run now.")
SUSPENDED = Gauge("penstock_executor_programs_suspended", "Programs that are suspended in favor of newer ones.")
QUANTUM_S = 0.25
_FORGIVENESS = 0.5
"""Debt that a suspended program loses per second."""
RESIDENT_PER_SLOT = 4
"""Started programs per slot, suspended ones included."""
SESSIONS_PER_SLOT = 16
"""Sessions per slot, which hold memory but no slot between their cells."""
SUSPENDED_BYTES_PER_SLOT = 512 << 20
_LOOK_EVERY_S = 0.02
_CGROUPS = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    charged_s: float
    held_s: float
    """Time in its slot."""
    resident_bytes: int


class Program(Protocol):
    async def usage(self) -> Usage | None:
        """Return what it has used; None if it ended."""

    def suspend(self) -> None:
        """Stop it until :meth:`resume`."""

    def resume(self) -> None:
        """Let it continue."""


class State(enum.Enum):
    WAITING = WAITING
    RUNNING = IN_PROGRESS
    SUSPENDED = SUSPENDED


@dataclasses.dataclass(eq=False, slots=True)
class Claim:
    number: int
    core: int = -1
    program: Program | None = None
    """Set once it can be suspended."""
    state: State = State.WAITING
    usage: Usage = Usage(0.0, 0.0, 0)
    """As last seen."""
    debt_s: float = 0.0
    since_s: float = 0.0
    """Time of ``debt_s``."""
    started: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def rank(self) -> tuple[float, int]:
        return self._left_s(), self.number

    def change(self, state: State) -> None:
        self.debt_s = self._left_s()
        self.since_s = time.monotonic()
        self.state = state

    def _left_s(self) -> float:
        if self.state is not State.SUSPENDED:
            return self.debt_s
        return max(0.0, self.debt_s - _FORGIVENESS * (time.monotonic() - self.since_s))

    def may_yield_to(self, other: "Claim") -> bool:
        """Whether its debt may have grown to a quantum more than the other's."""
        return self.debt_s + time.monotonic() - self.since_s > other.rank()[0] + QUANTUM_S

    def yields_to(self, other: "Claim") -> bool:
        """Whether its debt is a quantum more than the other's."""
        return self.debt_s > other.rank()[0] + QUANTUM_S

    async def look(self) -> None:
        usage = await self.program.usage() if self.program is not None else None
        if usage is not None:
            self.debt_s += usage.charged_s - self.usage.charged_s
            self.usage, self.since_s = usage, time.monotonic()


class Slots:
    """``count`` slots of one event loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._claims: dict[State, dict[Claim, None]] = {state: {} for state in State}
        """In the order of arrival."""
        self._numbers = itertools.count()
        self._sharing: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def claim(self, core: int = -1) -> AsyncIterator[Claim]:
        """Hold a slot, on ``core`` if it is a core's number."""
        claim = Claim(next(self._numbers), core)
        self._enter(claim, State.WAITING)
        try:
            self._fill()
            await claim.started.wait()
            yield claim
        finally:
            self._leave(claim)
            self._fill()

    async def close(self) -> None:
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.gather(self._sharing, return_exceptions=True)

    def _enter(self, claim: Claim, state: State) -> None:
        claim.change(state)
        self._claims[state][claim] = None
        state.value.inc()

    def _leave(self, claim: Claim) -> None:
        del self._claims[claim.state][claim]
        claim.state.value.dec()

    @property
    def _is_crowded(self) -> bool:
        return bool(self._claims[State.WAITING] or self._claims[State.SUSPENDED])

    def _fill(self) -> None:
        while new := next(filter(self._fits, self._candidates()), None):
            self._start(new)
        if self._sharing is None and self._is_crowded:
            self._sharing = asyncio.create_task(self._share(), name="slots of programs")

    def _fits(self, new: Claim) -> bool:
        running = self._claims[State.RUNNING]
        return len(running) < self._count and new.core not in {claim.core for claim in running}

    def _candidates(self) -> list[Claim]:
        suspended = self._claims[State.SUSPENDED]
        resident = len(suspended) + len(self._claims[State.RUNNING])
        new = self._claims[State.WAITING] if resident < RESIDENT_PER_SLOT * self._count else {}
        cores = {claim.core for claim in self._claims[State.RUNNING]}
        first = next((claim for claim in new if claim.core not in cores), next(iter(new), None))
        return sorted([*([first] if first else []), *suspended], key=Claim.rank)

    def _start(self, claim: Claim) -> None:
        self._leave(claim)
        if claim.state is State.SUSPENDED:
            assert claim.program is not None
            claim.program.resume()
        elif claim.core < 0:
            claim.core = self._least_used_core()
        self._enter(claim, State.RUNNING)
        claim.started.set()

    def _least_used_core(self) -> int:
        """Return a core with the fewest running, then the fewest programs.

        The core set is re-read, because a container's may change. Ties break at random, because other executors share
        the host.
        """
        running = collections.Counter(claim.core for claim in self._claims[State.RUNNING])
        present = running + collections.Counter(claim.core for claim in self._claims[State.SUSPENDED])
        return min(os.sched_getaffinity(0), key=lambda core: (running[core], present[core], random.random()))

    async def _share(self) -> None:
        try:
            while self._is_crowded:
                await self._look()
                self._preempt()
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            self._sharing = None

    async def _look(self) -> None:
        least = next(iter(self._candidates()), None)
        for claim in tuple(self._claims[State.RUNNING]):
            if least is not None and claim.may_yield_to(least):
                await claim.look()

    def _preempt(self) -> None:
        while pair := next(self._exchanges(), None):
            old, new = pair
            self._suspend(old)
            self._start(new)

    def _exchanges(self) -> Iterator[tuple[Claim, Claim]]:
        cores = {claim.core for claim in self._claims[State.RUNNING]}
        for new in self._candidates():
            for old in self._suspendable(new.usage.resident_bytes):
                if old.yields_to(new) and (old.core == new.core or new.core not in cores):
                    yield old, new

    def _suspendable(self, freed_bytes: int) -> list[Claim]:
        taken = sum(claim.usage.resident_bytes for claim in self._claims[State.SUSPENDED])
        free = SUSPENDED_BYTES_PER_SLOT * self._count - taken + freed_bytes
        running = sorted(self._claims[State.RUNNING], key=Claim.rank, reverse=True)
        return [claim for claim in running if claim.program is not None and claim.usage.resident_bytes <= free]

    def _suspend(self, claim: Claim) -> None:
        assert claim.program is not None
        claim.program.suspend()
        self._leave(claim)
        self._enter(claim, State.SUSPENDED)


def count() -> int:
    cores = len(os.sched_getaffinity(0))
    return max(1, math.floor(min(cores, quota(_CGROUPS, Path("/proc/self/cgroup")))))


def quota(root: Path, membership: Path) -> float:
    """The CPU quota in cores of a process's cgroup (version 2) and its ancestors; infinite without one."""
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                group = root / line.removeprefix("0::").strip().lstrip("/")
                return min(_own_quota(folder) for folder in (group, *group.parents) if folder.is_relative_to(root))
    return math.inf


def _own_quota(folder: Path) -> float:
    try:
        allowed, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return math.inf if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError):
        return math.inf
