"""Admission: keep a group in flight for each slot, in dataset order.

::

    wake (version promoted, run started) ─┐
    every poll_s ─────────────────────────┴─▶ room? ──▶ build prompts ──▶ admit (one script)

The cursor moves with the prompts in one transaction; a rollback shifts the dataset position, never group ids. The
script rechecks state and slots, so a pause is immediate. A replica behind ``min_version``, the newest version, waits,
which bounds the lag.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable

from prometheus_client import Counter

from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.admission.curriculum import Curriculum
from penstock.services.coordinator.admission.dataset import Dataset
from penstock.services.coordinator.admission.demonstrations import experience
from penstock.services.coordinator.admission.mixing import EpochOrder, MixedOrder
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Experience, PolicyVersion, Prompt, Sampling
from penstock.shared.bus.stores.experience.signals import read_current
from penstock.shared.bus.stores.policy.ledger import AdmissionState, Ledger, RunState
from penstock.shared.errors import BusFull
from penstock.shared.settings import SamplingSettings, Settings
from penstock.shared.traces import TRACES

ADMITTED = Counter("penstock_coordinator_admitted_total", "Groups admitted by this process.")

_MOST_AT_ONCE = 4096
_NOT_RUNNING, _MOVED = -1, -2


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    sampling: Sampling
    slots: int
    groups_per_step: int
    steps: int
    whole: bool = False
    """One entry a group, whose samples depend on no other request."""
    environment: str = ""
    """What the turns of an episode happen in."""
    by_source: tuple[Sampling, ...] = ()
    """Sampling of each dataset, if they differ."""


def terms_of(settings: Settings) -> Terms:
    sampling = settings.sampling
    of_source = [sampling.of(source) for source in settings.data.sources] if sampling.by_dataset else []
    drawn, *by_source = (drawn_by(own, own.group_size, own.temperature) for own in (sampling, *of_source))
    steps, whole = settings.run.steps, settings.run.deterministic == "run"
    per_step, environment = settings.algorithm.groups_per_step, settings.episodes.name
    return Terms(drawn, settings.slots, per_step, steps, whole, environment, tuple(by_source))


def drawn_by(settings: SamplingSettings, samples: int, temperature: float) -> Sampling:
    """Return the sampling of ``samples`` completions at ``temperature``; a greedy one is not truncated."""
    truncated = (settings.kept_tokens, settings.top_p, settings.min_p) if temperature else ()
    sampling = Sampling(samples, settings.max_new_tokens, temperature, *truncated)
    return dataclasses.replace(sampling, min_new_tokens=settings.min_new_tokens, stop=settings.stop)


@dataclasses.dataclass(eq=False)
class Admission:
    """Admit the problems of one dataset."""

    bus: Bus
    ledger: Ledger
    dataset: Dataset
    order: EpochOrder | MixedOrder | Curriculum
    terms: Callable[[], Terms]
    """Return the current terms."""
    gate: Callable[[], bool]
    """Whether admission may begin."""
    shortage: Shortage
    poll_s: float = 0.1
    _wake: asyncio.Event = dataclasses.field(default_factory=asyncio.Event, init=False)
    _followed: PolicyVersion | None = dataclasses.field(default=None, init=False)

    def wake(self) -> None:
        """Check for free slots now."""
        self._wake.set()

    async def run(self) -> None:
        """Admit until cancelled."""
        while True:
            if not self.gate() or not await self.shortage.is_over() or await self._fill() <= 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.poll_s):
                        await self._wake.wait()
                self._wake.clear()

    async def _fill(self) -> int:
        try:
            return await self.admit()
        except BusFull:
            await self.shortage.begin()
            return 0

    async def admit(self) -> int:
        """Fill the free slots, at most 4,096 samples or a group; return the number of admitted groups.

        Raises:
            BusFull: out of memory; nothing was admitted.
        """
        while True:
            run = await self.ledger.admission_state()
            newest, room = run.newest_version, self._room(run)
            if newest is None or room <= 0:
                return 0
            if not await self._follow_signals(newest):
                continue
            terms = self.terms()
            count = min(room, max(1, _MOST_AT_ONCE // terms.sampling.samples))
            places = range(run.cursor, run.cursor + count)
            groups = [self._group(place, run.shift, newest) for place in places]
            admitted = await self.ledger.admit(
                groups, terms.slots, terms.groups_per_step, terms.steps, newest, whole=terms.whole
            )
            if admitted != _MOVED:
                ADMITTED.inc(max(0, admitted))
                now_s = time.time()
                for group in groups[: max(0, admitted)]:
                    TRACES.add("admitted", group.group_id, now_s, now_s, version=int(newest))
                return max(0, admitted)

    async def _follow_signals(self, newest: PolicyVersion) -> bool:
        """Have the curriculum draw by the signals of ``newest``; False if there is a newer version."""
        if not isinstance(self.order, Curriculum) or self._followed == newest:
            return True
        self._followed, signals = await read_current(self.bus)
        self.order.follow({problem: float(value) for problem, value in signals.items()})
        return self._followed == newest

    def _room(self, run: AdmissionState) -> int:
        if run.state is not RunState.RUNNING or run.head is None:
            return 0
        terms = self.terms()
        return min(terms.slots, (terms.steps - run.step) * terms.groups_per_step) - run.in_flight

    def _group(self, group_id: int, shift: int, newest: PolicyVersion) -> Prompt | Experience:
        index, terms = self.order.index(group_id - shift), self.terms()
        problem = self.dataset.problems[index]
        if problem.demonstration is not None:
            return experience(problem, group_id, newest)
        sampling = terms.by_source[self.dataset.source_of(index)] if terms.by_source else terms.sampling
        prompt = dataclasses.replace(problem.prompt(group_id, sampling), environment=terms.environment)
        return dataclasses.replace(prompt, min_version=newest, admitted_at_s=time.time())
