"""When the trainer's devices are lent to guests (docs/placement.md).

::

    commit ──▶ waits ──▶ expected wait > switches there and back ──▶ lent ──▶ batch almost complete ──▶ taken back
                 ▲                                                               │ not completed after all
                 └───────────────────────────────────────────────────────────────┘ the next one ends with the batch

Figures are of this run. It decides; the driver switches.
"""

import dataclasses
import statistics
from collections import defaultdict, deque

_WEIGHT = 0.3
"""Of the newest figure."""
_LOOKS_S = 0.1
"""Until a release, a grant and its answer are noticed."""
_MARGIN = 1.25
_LENDS = 5
"""The newest, whose median is what a switch costs: the first one at a rung allocates pinned memory."""


def lends(missing: int, waited_s: float, rate: float | None, cost_s: float | None) -> bool:
    """Whether a wait is expected to last longer than the switches there and back, with a margin.

    A wait is expected to last as long as it has lasted: so every wait that does not end is lent in the end, and one that
    is lent in vain costs at most about as much again.

    Args:
        missing: samples of the next batch that are not generated yet.
        waited_s: seconds of this wait with the devices.
        rate: samples per second in earlier waits; None: not measured.
        cost_s: of the switches; None: not measured.
    """
    if cost_s is None:
        return False
    expected_s = missing / rate if rate else 0.0
    return max(expected_s, waited_s) > _MARGIN * cost_s


def is_due(missing: int, rate: float | None, back_s: float | None) -> bool:
    """Whether the batch will be complete before the devices are back, if these are asked for now."""
    return rate is not None and back_s is not None and missing <= rate * back_s


def missing_samples(groups: int, samples: int, in_flight: int, complete: int, unfinished: int) -> int:
    """Return the samples that the next batch lacks, if earlier groups are generated first.

    Args:
        groups: of a batch, with ``samples`` each.
        in_flight: groups between admission and commit, of which ``complete`` are generated.
        unfinished: samples in flight that are not generated yet.

    >>> missing_samples(8, 4, in_flight=16, complete=6, unfinished=37)
    5
    """
    lacking = groups - complete
    return max(lacking, unfinished - (in_flight - groups) * samples) if lacking > 0 else 0


@dataclasses.dataclass(slots=True)
class Smoothed:
    """A figure of which newer values count more."""

    value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else (1 - _WEIGHT) * self.value + _WEIGHT * value


class _Costs:
    """Seconds of the parts of lends at one rung."""

    def __init__(self) -> None:
        self.free, self.switch, self.reload = (deque[float](maxlen=_LENDS) for _ in range(3))

    @property
    def total_s(self) -> float:
        """Return their sum, 0 for what was not measured."""
        return sum(statistics.median_low(part) for part in (self.free, self.switch, self.reload) if part)


class Lending:
    """One trainer's waits; times are monotonic seconds.

    Switches cost what they did at the same rung, without those for a guest that loads its model. At a rung that was not
    measured they cost nothing, so that a wait is lent once and measures them.

    Args:
        has_guests: whether a guest has switched before, as the trainer restarts.
    """

    def __init__(self, *, has_guests: bool = False) -> None:
        self._samples, self._seconds, self._back = (Smoothed() for _ in range(3))
        self._costs: defaultdict[int, _Costs] = defaultdict(_Costs)
        self._has_guests = has_guests
        self._wait: tuple[float, int] | None = None
        self._is_first = True
        """Whether replicas may still load their models."""
        self._alone_since_s = 0.0
        self._lent_at_s: float | None = None
        self._rung: int | None = None
        """Of the newest lend; None: for a guest to load its model."""
        self._was_early = False
        self._figures: dict[str, float] = {}

    @property
    def rate(self) -> float | None:
        if not self._samples.value or not self._seconds.value:
            return None
        return self._samples.value / self._seconds.value

    def cost_s(self, rung: int) -> float | None:
        """Return seconds of the switches there and back, without margin; None before a guest has switched."""
        return self._costs[rung].total_s + _LOOKS_S if self._has_guests else None

    def is_worthwhile(self, missing: int, now_s: float, rung: int) -> bool:
        """Whether to lend now, at ``rung``; begins a wait."""
        if self._wait is None:
            self._wait, self._alone_since_s, self._was_early = (now_s, missing), now_s, False
        return lends(missing, now_s - self._alone_since_s, self.rate, self.cost_s(rung))

    def is_due(self, missing: int) -> bool:
        """Whether to take the devices back before the batch is complete: once a wait, as a guest may have the rest."""
        if self._was_early or not is_due(missing, self.rate, self._back.value):
            return False
        self._was_early = True
        return True

    def note_lent(self, now_s: float, free_s: float, rung: int | None) -> None:
        """``rung``: at which memory was freed; None: for a guest to load its model."""
        if rung is not None:
            self._costs[rung].free.append(free_s)
        self._lent_at_s, self._rung = now_s, rung

    def note_returned(self, now_s: float, asked_s: float, switch_s: float | None, generated: tuple[int, int]) -> None:
        """``asked_s``: when they were asked for; ``switch_s``: the guests' part of the cost; 0 if none had a turn, None
        if none had one before.
        """
        self._has_guests = self._has_guests or switch_s is not None
        if self._lent_at_s is None:
            return  # at the trainer's start
        if self._rung is not None:
            self._back.add(now_s - asked_s)
            if switch_s:
                self._costs[self._rung].switch.append(switch_s)
        figures = {"lends": 1.0, "lent_s": now_s - self._lent_at_s}
        figures |= {"lent_samples": float(generated[0]), "lent_tokens": float(generated[1])}
        self._figures = {name: self._figures.get(name, 0.0) + value for name, value in figures.items()}
        self._lent_at_s, self._alone_since_s = None, now_s

    def note_step(self, reload_s: float) -> None:
        """Note a step's seconds of moving memory back, if it was lent before."""
        if self._figures and self._rung is not None:
            self._costs[self._rung].reload.append(reload_s)

    def note_complete(self, now_s: float) -> None:
        """End the wait: the batch is complete."""
        if self._wait is not None:
            started_s, missing = self._wait
            if missing and not self._is_first:
                self._samples.add(float(missing))
                self._seconds.add(max(now_s - started_s, 1e-3))
            self._wait, self._is_first = None, False

    def take_figures(self, rung: int) -> dict[str, float]:
        """Return the figures of the step that was just made; ``rung``: of the next lend."""
        figures, self._figures = self._figures, {}
        if (cost_s := self.cost_s(rung)) is not None:
            figures["lend_cost_s"] = cost_s
        return figures
