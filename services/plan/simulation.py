"""A discrete-event simulation of a run, by the rules of the system.

::

    admission ─▶ prompts ─▶ replica: waits for min_version ─▶ engine ─▶ bus ─▶ reward replica ─▶ trainer: oldest groups
        ▲  while in flight < (max_lag + 1) · groups_per_step                                        │ commit
        └────────────────────────── a version, live in the replicas after the transfer ◀────────────┘

A group is the unit: its samples decode together, and it ends with its longest one. All groups of an engine advance by
a token per decoding step, whose seconds grow with the sequences in it. Bus and coordinator are queues with one server.
``cores`` is the processor time of a host without GPUs, which its processes share.
"""

import dataclasses
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.services.plan.measured import WARM_UP, steady
from penstock.services.plan.rates import COORDINATOR_BEAT_S, SLOWED, Rates
from penstock.services.plan.workload import Workload

_SPANS = 4000
_POOL = 1009
"""Groups that are drawn; they repeat."""


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """The replicas, and how trainer and replicas share GPUs."""

    replicas: int
    max_groups: int
    """Of one replica."""
    borrowed: int = 0
    """Replicas on the trainer's GPUs: they pause while it trains, or continue at the speed ``Rates.beside``."""
    reward_replicas: int = 1
    cores: float = 0.0
    """Of a host without GPUs; 0: every process has its own."""
    batched: bool = False
    """An engine takes new groups only when it has ended all others (transformers)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """What an actor did: ``generate``, ``train`` or ``update``."""

    actor: str
    kind: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedFigures:
    """Figures of the simulated run's steady steps."""

    samples_per_s: float
    step_s: float
    trainer_idle: float
    rollout_idle: float
    lags: dict[int, float]
    """Share of groups by lag."""
    dropped: float
    """Stale groups per trained group."""
    source_busy: float
    """Share of time in which weights are moving; near 1, versions are skipped."""
    bus_busy: float
    coordinator_busy: float
    spans: tuple[Span, ...]

    @property
    def lag_mean(self) -> float:
        """In steps."""
        return sum(lag * share for lag, share in self.lags.items())


@dataclasses.dataclass(slots=True)
class _Group:
    number: int
    tokens: float
    """All of it, prompt included."""
    longest: float
    sequences: float
    """Mean number of its samples that decode at a time."""
    min_version: int
    version: int = 0
    """At its first token."""


@dataclasses.dataclass(slots=True)
class _Replica:
    number: int
    borrowed: bool
    held: list[_Group] = dataclasses.field(default_factory=list)
    """Taken, and waiting for weights or for the engine."""
    running: list[tuple[float, int, _Group]] = dataclasses.field(default_factory=list)
    """By the tokens of the engine's clock at which they end."""
    sequences: float = 0.0
    clock: float = 0.0
    """Decoding steps so far."""
    seen_s: float = 0.0
    speed: float = 0.0
    """Decoding steps per second."""
    epoch: int = 0
    busy_s: float = 0.0
    started_s: float = 0.0
    paused: bool = False
    share: float = 1.0
    """Of its speed alone, beside the trainer."""

    @property
    def load(self) -> float:
        """Return the samples that it has taken and that did not end, on average."""
        return self.sequences + sum(group.sequences for group in self.held)


def simulate(
    work: Workload, rates: Rates, side: Side, steps: int, *, seed: int = 0, record: bool = False
) -> SimulatedFigures:
    return _Run(work, rates, side, steps, seed, record).outcome()


def _draw(work: Workload, seed: int) -> list[tuple[float, float, float]]:
    """Return groups: all tokens, the longest sample, and the mean number of samples that decode."""
    draw, lengths, pool = random.Random(seed), work.lengths.quantiles(997), []
    for _ in range(_POOL):
        drawn = draw.choices(lengths, k=work.group_size)
        pool.append((sum(drawn) + work.prompt_tokens, max(drawn), sum(drawn) / max(drawn)))
    return pool


class _Run:
    def __init__(self, work: Workload, rates: Rates, side: Side, steps: int, seed: int, record: bool) -> None:
        self._work, self._rates, self._side, self._steps, self._record = work, rates, side, steps, record
        self._pool = _draw(work, seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._now = 0.0
        first = side.replicas
        self._replicas = [_Replica(number, number >= first) for number in range(first + side.borrowed)]
        self._free = [(0.0, replica.number) for replica in self._replicas]
        heapq.heapify(self._free)
        self._prompts: deque[_Group] = deque()
        self._scored: list[tuple[int, _Group]] = []
        self._reward_free_s = [0.0] * side.reward_replicas
        self._bus_free_s = self._coordinator_free_s = self._source_free_s = 0.0
        self._bus_busy_s = self._coordinator_busy_s = self._source_busy_s = 0.0
        self._step = self._admitted = self._in_flight = self._live = self._dropped = 0
        self._training = False
        self._trained_s = self._train_started_s = 0.0
        self._train_ends_s, self._train_epoch = 0.0, 0
        self._active = 0
        self._rate = 1.0
        self._lags: Counter[int] = Counter()
        self._commits: list[float] = []
        self._busy_at: list[tuple[float, float, float, float, float]] = []
        self._spans: list[Span] = []

    def outcome(self) -> SimulatedFigures:
        self._admit()
        while self._step < self._steps and self._events:
            self._now, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)
        return self._measured()

    def _at(self, when_s: float, event: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), event, arguments))

    # ---------------------------------------------------------------- coordinator

    def _admit(self) -> None:
        room = min(self._work.slots, (self._steps - self._step) * self._work.groups) - self._in_flight
        if room <= 0:
            return
        self._in_flight += room
        seconds = room * self._rates.coordinator_s
        self._coordinator_busy_s += seconds
        self._coordinator_free_s = max(self._now, self._coordinator_free_s) + seconds
        groups = [self._group() for _ in range(room)]
        self._at(self._coordinator_free_s, self._deal, groups)

    def _group(self) -> _Group:
        tokens, longest, sequences = self._pool[self._admitted % _POOL]
        self._admitted += 1
        return _Group(self._admitted, tokens, longest, sequences, self._step)

    def _deal(self, groups: Sequence[_Group]) -> None:
        self._prompts.extend(groups)
        self._take()

    # ---------------------------------------------------------------- replicas

    def _take(self) -> None:
        """Give prompts to the replicas with the fewest samples."""
        touched: dict[int, _Replica] = {}
        while self._prompts and self._free:
            load, number = heapq.heappop(self._free)
            replica = self._replicas[number]
            if replica.load != load or not self._may_take(replica):
                continue  # it was offered again since then, or will be
            replica.held.append(self._prompts.popleft())
            touched[number] = replica
            self._offer(replica)
        for replica in touched.values():
            self._start(replica)

    def _offer(self, replica: _Replica) -> None:
        """Let a replica that has room again take prompts."""
        if self._may_take(replica):
            heapq.heappush(self._free, (replica.load, replica.number))

    def _may_take(self, replica: _Replica) -> bool:
        """Whether a replica has room for more samples."""
        return replica.load < self._side.max_groups * self._work.group_size

    def _start(self, replica: _Replica) -> None:
        """Start the held groups whose version is live."""
        if replica.paused or not replica.held or (self._side.batched and replica.running):
            return
        ready = [group for group in replica.held if group.min_version <= self._live]
        if not ready:
            return
        self._advance(replica)
        replica.held = [group for group in replica.held if group.min_version > self._live]
        if not replica.running:
            replica.started_s = self._now
            self._occupy(1)
        replica.sequences += sum(group.sequences for group in ready)
        prefill = len(ready) * self._rates.prefill_s / self._rates.decoding(replica.sequences)
        for group in ready:
            group.version = self._live
            heapq.heappush(replica.running, (replica.clock + group.longest + prefill, group.number, group))
        self._schedule(replica)

    def _advance(self, replica: _Replica) -> None:
        replica.clock += (self._now - replica.seen_s) * replica.speed
        replica.seen_s = self._now

    def _schedule(self, replica: _Replica) -> None:
        """Set the engine's speed and its next end, after any change."""
        replica.epoch += 1
        if replica.paused or not replica.running:
            replica.speed = 0.0
            return
        replica.speed = self._rate * replica.share / self._rates.decoding(replica.sequences)
        epoch, end_s = replica.epoch, self._now + max(0.0, replica.running[0][0] - replica.clock) / replica.speed
        self._at(end_s, self._finish, replica, epoch)

    def _finish(self, replica: _Replica, epoch: int) -> None:
        if epoch != replica.epoch:
            return
        self._advance(replica)
        limit = replica.clock + 1e-6
        while replica.running and replica.running[0][0] <= limit:
            group = heapq.heappop(replica.running)[2]
            replica.sequences = max(0.0, replica.sequences - group.sequences)
            self._hand_over(group)
        if not replica.running:
            self._rest(replica)
        self._offer(replica)
        self._take()
        if replica.epoch == epoch:  # nothing was started
            self._schedule(replica)
            self._start(replica)

    def _rest(self, replica: _Replica) -> None:
        replica.busy_s += self._now - replica.started_s
        self._span(f"rollout-{replica.number}", "generate", replica.started_s)
        replica.sequences = 0.0
        self._occupy(-1)

    def _occupy(self, change: int) -> None:
        """Note that an actor began or ended to compute, which slows others on a host with few cores."""
        self._active += change
        if not self._side.cores:
            return
        rate = min(1.0, self._side.cores / max(1, self._active))
        if rate == self._rate:
            return
        before, self._rate = self._rate, rate
        for replica in self._replicas:
            if replica.running:
                self._advance(replica)
                self._schedule(replica)
        if self._training:
            left_s = (self._train_ends_s - self._now) * before / rate
            self._end_training_at(self._now + left_s)

    # ---------------------------------------------------------------- bus, reward

    def _hand_over(self, group: _Group) -> None:
        self._bus_busy_s += self._rates.bus_s
        self._bus_free_s = max(self._now, self._bus_free_s) + self._rates.bus_s
        start_s = max(self._bus_free_s, heapq.heappop(self._reward_free_s))
        heapq.heappush(self._reward_free_s, start_s + self._rates.score_s)
        self._at(start_s + self._rates.score_s, self._arrive, group)

    def _arrive(self, group: _Group) -> None:
        heapq.heappush(self._scored, (group.number, group))
        self._train()

    # ---------------------------------------------------------------- trainer

    def _train(self) -> None:
        if self._training or len(self._scored) < self._work.groups:
            return
        fresh = [entry for entry in self._scored if self._step - entry[1].version <= self._work.max_lag]
        stale = len(self._scored) - len(fresh)
        if stale:
            self._scored = fresh
            heapq.heapify(self._scored)
            self._dropped += stale
            self._in_flight -= stale
            self._admit()
        if len(self._scored) < self._work.groups:
            return
        batch = [heapq.heappop(self._scored)[1] for _ in range(self._work.groups)]
        if self._commits and len(self._commits) >= self._steps // WARM_UP:
            self._lags.update(self._step - group.version for group in batch)
        self._training, self._train_started_s = True, self._now
        switch = self._pause(paused=True)
        seconds = self._rates.step(sum(group.tokens for group in batch)) * self._slowed
        self._occupy(1)
        self._end_training_at(self._now + switch + seconds / self._rate)

    def _end_training_at(self, when_s: float) -> None:
        self._train_epoch += 1
        epoch, self._train_ends_s = self._train_epoch, when_s
        self._at(when_s, self._commit, epoch)

    @property
    def _slowed(self) -> float:
        """The factor by which generation beside it lengthens a training step, if there is any when the step starts."""
        beside = self._rates.beside and any(replica.borrowed and replica.running for replica in self._replicas)
        return SLOWED if beside else 1.0

    def _pause(self, *, paused: bool) -> float:
        """Pause or wake the replicas on the trainer's GPUs; return the seconds of the switch, if it is one."""
        borrowed = [replica for replica in self._replicas if replica.borrowed]
        if paused and any(
            replica.paused for replica in borrowed
        ):  # the batch was there when the one before was trained
            return 0.0
        for replica in borrowed:
            self._advance(replica)
            if self._rates.beside:
                replica.share = self._rates.beside if paused else 1.0
                self._schedule(replica)
                continue
            if replica.running and paused:
                replica.busy_s += self._now - replica.started_s
                self._span(f"rollout-{replica.number}", "generate", replica.started_s)
            replica.started_s = self._now
            if replica.paused and not paused:
                self._fill_again(replica)
            replica.paused = paused
            self._schedule(replica)
            if not paused:
                self._start(replica)
                self._offer(replica)
        return self._rates.switch_s / 2 if borrowed else 0.0

    def _fill_again(self, replica: _Replica) -> None:
        """Delay the groups of an engine that was paused by the forward pass over what they have so far."""
        if not self._rates.again_s or not replica.running:
            return
        tokens = 0.0
        for end, _, group in replica.running:
            decoded = max(0.0, group.longest - (end - replica.clock))
            tokens += self._work.prompt_tokens + group.sequences * decoded
        later = tokens * self._rates.again_s / self._rates.decoding(replica.sequences)
        replica.running = [(end + later, number, group) for end, number, group in replica.running]

    def _commit(self, epoch: int) -> None:
        if epoch != self._train_epoch:
            return
        self._training = False
        self._step += 1
        self._trained_s += self._now - self._train_started_s
        self._span("trainer", "train", self._train_started_s)
        self._commits.append(self._now)
        self._busy_at.append(
            (self._trained_s, self._generated_s(), self._source_busy_s, self._bus_busy_s, self._coordinator_busy_s)
        )
        self._occupy(-1)
        self._in_flight -= self._work.groups
        self._publish(self._step)
        self._at(self._now + (self._rates.switch_s / 2 if self._side.borrowed else 0.0), self._wake)
        self._admit()
        self._train()

    def _wake(self) -> None:
        if not self._training:
            self._pause(paused=False)
            self._take()

    def _publish(self, version: int) -> None:
        start_s = max(self._now, self._source_free_s)
        if start_s > self._now:  # the transfer before is under way: the newest version is next
            self._at(start_s, self._publish_newest, version)
            return
        self._source_free_s = start_s + self._rates.transfer_s
        self._source_busy_s += self._rates.transfer_s
        self._at(self._source_free_s, self._go_live, version)

    def _publish_newest(self, version: int) -> None:
        if version == self._step:
            self._publish(version)

    def _go_live(self, version: int) -> None:
        self._live = max(self._live, version)
        self._spans_of_update()
        for replica in self._replicas:
            if replica.held:
                self._start(replica)

    # ---------------------------------------------------------------- figures

    def _generated_s(self) -> float:
        running = (
            self._now - replica.started_s for replica in self._replicas if replica.running and not replica.paused
        )
        return sum(replica.busy_s for replica in self._replicas) + sum(running)

    def _spans_of_update(self) -> None:
        self._span("weights", "update", self._now - self._rates.transfer_s)

    def _span(self, actor: str, kind: str, start_s: float) -> None:
        if self._record and len(self._spans) < _SPANS and self._now > start_s:
            self._spans.append(Span(actor, kind, start_s, self._now))

    def _measured(self) -> SimulatedFigures:
        if len(self._commits) < 2:
            raise ValueError(f"expected at least 2 simulated steps, found {len(self._commits)}")
        counted = steady(len(self._commits), self._work.max_lag)
        first, last = counted.start - 1, counted.stop - 1
        span_s, count = max(1e-9, self._commits[last] - self._commits[first]), last - first
        trained, generated, source, bus, coordinator = (
            after - before for after, before in zip(self._busy_at[last], self._busy_at[first], strict=True)
        )
        beats = len(self._replicas) * COORDINATOR_BEAT_S
        groups = max(1, self._lags.total())
        return SimulatedFigures(
            samples_per_s=count * self._work.samples / span_s,
            step_s=span_s / count,
            trainer_idle=max(0.0, 1 - trained / span_s),
            rollout_idle=max(0.0, 1 - generated / span_s / max(1, len(self._replicas))),
            lags={lag: number / groups for lag, number in sorted(self._lags.items())},
            dropped=self._dropped / max(1, self._step * self._work.groups),
            source_busy=min(1.0, source / span_s),
            bus_busy=min(1.0, bus / span_s),
            coordinator_busy=min(1.0, coordinator / span_s + beats),
            spans=tuple(self._spans),
        )
