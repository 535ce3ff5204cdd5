"""Track scorer failures for heartbeat, readiness, metrics and events.

A part is a scorer, the reference, the expression, or scoring as a whole (unforeseen exceptions).
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import Counter, Gauge

from penstock.shared.bus.stores.replicas.heartbeats import PartFailure
from penstock.shared.process.telemetry import Status

log = logging.getLogger(__name__)

FAILURES = Counter(
    "penstock_reward_failures_total",
    "Groups that a scorer, the reference or the expression failed on, each attempt counted.",
    ["part"],
)
AVAILABLE = Gauge("penstock_reward_scorer_available", "1 while a scorer works, else 0.", ["scorer"])
HANDLER = "scoring"
SILENT_S = 6.0
"""A call that takes this long, and much longer than any before, may hang."""
DRY_RUN_SILENT_S = 3.0
"""The same in the dry run, where each call scores one short completion."""
_SILENT_TIMES = 3.0
_EVENT_EVERY_S = 60.0
"""Minimum time between events of an intermittent failure."""

Tell = Callable[[str, str], Awaitable[None]]


def part_of(scorer: str) -> str:
    return f"scorer {scorer!r}"


@dataclasses.dataclass(slots=True)
class _Calls:
    running: dict[int, tuple[float, str, float]] = dataclasses.field(default_factory=dict)
    """Start (monotonic seconds), row, and least silence in seconds of each running call."""
    longest_s: float = 0.0
    answered_s: float = 0.0
    """When a call last ended, monotonic seconds."""


class Failures:
    """Failures of one replica's parts; lives in its event loop.

    ``ready_s``: of the parts that take turns on a device, when it became theirs (the current time while it is not): a call
    that waits for it does not hang.
    """

    def __init__(
        self,
        status: Status,
        tell: Tell | None = None,
        ready_s: Mapping[str, Callable[[], float]] = MappingProxyType({}),
    ) -> None:
        self._status = status
        self._tell = tell
        self._ready_s = ready_s
        self._down: dict[str, str] = {}
        self._calls: dict[str, _Calls] = {}
        self._number = 0
        self._silent: set[str] = set()
        self._event_s: dict[str, float] = {}

    @contextlib.contextmanager
    def calling(self, part: str, problem: str, silent_s: float = SILENT_S) -> Iterator[None]:
        """It may hang if it takes longer than ``silent_s``."""
        if part not in self._calls:
            FAILURES.labels(part)  # create the series at 0
            self._calls[part] = _Calls()
        calls = self._calls[part]
        self._number += 1
        number, started_s = self._number, time.monotonic()
        calls.running[number] = (started_s, problem, silent_s)
        try:
            yield
        finally:
            del calls.running[number]
            calls.answered_s = time.monotonic()
            calls.longest_s = max(calls.longest_s, calls.answered_s - self._begun_s(part, started_s))
            self._silent.discard(part)

    async def failed(self, part: str, problem: str, reason: str) -> None:
        before = self._status.failures.get(part)
        now_s = time.time()
        self._status.failures[part] = PartFailure(
            part=part,
            reason=reason[:500],
            problem=problem[:200],
            failed=1 + (before.failed if before else 0),
            in_a_row=1 + (before.in_a_row if before and before.failed else 0),
            at_s=now_s,
        )
        FAILURES.labels(part).inc()
        if self._tell is not None and now_s - self._event_s.get(part, 0.0) > _EVENT_EVERY_S:
            self._event_s[part] = now_s
            await self._tell(f"{part} failed", f"{problem}: {reason}")

    def succeeded(self, part: str) -> None:
        before = self._status.failures.get(part)
        if before is None:
            return
        if before.failed:
            self._status.failures[part] = dataclasses.replace(before, in_a_row=0)
        else:
            del self._status.failures[part]  # it was only slow

    def set_available(self, scorer: str, problem: str | None) -> None:
        if (problem is None) == (scorer not in self._down):
            return
        AVAILABLE.labels(scorer).set(problem is None)
        if problem is None:
            del self._down[scorer]
            log.info("scorer available again", extra={"scorer": scorer})
        else:
            self._down[scorer] = problem
            log.warning("scorer unavailable", extra={"scorer": scorer, "reason": problem})
        self._status.state = "degraded" if self._down else "working"
        self._status.last_error = "; ".join(f"scorer {name!r}: {reason}" for name, reason in self._down.items())

    def _begun_s(self, part: str, started_s: float) -> float:
        """Return when a call began, or its part had its device, in monotonic seconds."""
        return max(started_s, self._ready_s[part]()) if part in self._ready_s else started_s

    def look(self) -> None:
        now_s = time.monotonic()
        for part, calls in self._calls.items():
            if not calls.running:
                continue
            started_s, problem, least_s = min(calls.running.values())
            silent_s = now_s - max(self._begun_s(part, started_s), calls.answered_s)
            if part in self._silent or silent_s < max(least_s, _SILENT_TIMES * calls.longest_s):
                continue
            self._silent.add(part)
            before = self._status.failures.get(part) or PartFailure(part, "", "", 0, 0, 0.0)
            reason = f"no answer for {silent_s:.0f} s, and it keeps waiting until the scorer's timeout"
            self._status.failures[part] = dataclasses.replace(
                before, reason=reason, problem=problem, in_a_row=max(1, before.in_a_row), at_s=time.time()
            )
            log.warning("scorer silent", extra={"part": part, "problem": problem, "silent_s": silent_s})
