"""The layouts of a run on a cluster: which fit, and how fast each is.

``separate``: trainer and replicas have GPUs of their own. ``shared``: they take turns on the same GPUs, small models with
several engines under CUDA MPS. ``at once``: a rank and a replica of several engines of a small model on each GPU, under
CUDA MPS. Where GPUs are shared in turn, the
engines give way on the lowest rung that fits:

    0 it keeps all its memory · 1 without its cache · 2 without its weights · 3 and the optimizer's state goes to the host
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from services.plan import rates as rooflines
from services.plan.hardware import Cluster
from services.plan.measured import Corrections
from services.plan.memory import (
    CONTEXT,
    Component,
    Components,
    EngineMemory,
    EngineOptions,
    Phase,
    Table,
    TrainerOptions,
    engine_memory,
    peak,
    scoring_memory,
    several_engines,
    total,
    trainer_table,
)
from services.plan.rates import Rates
from services.plan.simulation import Side, SimulatedFigures, simulate
from services.plan.workload import Workload
from shared.settings.placement import USABLE_IN_TURNS, moved_and_staying

Placement = Literal["separate", "shared", "at once"]
"""``at once`` is ``placement.mode = "separate"`` with the same GPUs in trainer.gpus and rollout.gpus."""
PLACEMENTS: tuple[Placement, ...] = ("separate", "shared", "at once")
USABLE = 0.95
"""Of a GPU's memory; the rest is fragmentation."""
_SIMULATED = 16
_MOST_GROUPS = 12_000
"""Of one simulation."""
_SMALL = 6.5e9
"""Weights below which one engine leaves a GPU idle (services/rollout/engines/vllm/several/plan.py)."""
_WAYS = (("adamw", "none"), ("adamw_8bit", "none"), ("adamw", "optimizer"), ("adamw", "all"))
"""Optimizers and offloading, in the order of what they cost."""
_SWITCH_S = (0.05, 0.3, 0.8, 0.8)
"""Both ways, by rung; rung 3 also moves the optimizer's state."""
_FREES_SNAPSHOTS = 2
"""The rung from which the trainer of ``shared`` has no snapshot while it trains (services/trainer/rank0/publication.py)."""
_USABLE_FREED = 0.93
"""Of a GPU's memory, where a snapshot comes and goes: at 7B on an H200 a trainer that held 122 GB took 129 of the device
(benchmarks/results/2026-11-24-7b-one-gpu-h200.json)."""
_STATES = ("master weights", "moments")
_CONTEXT_ASLEEP = 3.0 * (1 << 30)
"""What a sleeping vLLM engine keeps (2.9 GiB of 139.9 on an H200)."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuLayout:
    placement: Placement
    trainer: TrainerOptions
    tensor_parallel: int
    replicas: int
    """With GPUs of their own; with ``shared`` and ``at once``, none has."""
    engines: int = 1
    mps: bool = False
    """Whether several processes use a GPU under CUDA MPS instead of in time slices."""
    borrowed: int = 0
    """Replicas on the trainer's GPUs."""
    rung: int = 0
    moved_bytes: float = 0.0
    """Of optimizer states on each GPU, to the host for generation."""
    shadow: bool = True
    scoring: int = 0
    """GPUs of the reward service's own."""

    @property
    def all_replicas(self) -> int:
        """Own and borrowed."""
        return self.replicas + self.borrowed

    @property
    def copies(self) -> int:
        """Copies of a version that rank 0 sends where weights are pulled.

        Replicas with a shadow relay; without one, as on devices that are used in turn, each engine pulls from rank 0.
        """
        streaming = 0 if self.shadow else self.all_replicas
        return min(rooflines.FAN_OUT, self.all_replicas - streaming) + streaming * self.engines

    @property
    def gpus(self) -> int:
        return self.trainer.ranks + self.replicas * self.tensor_parallel + self.scoring

    @property
    def words(self) -> str:
        trainer = self.trainer
        train = f"train on {trainer.ranks}, ZeRO {trainer.zero_stage}"
        train += ", 8-bit Adam" if trainer.optimizer == "adamw_8bit" else ""
        train += f", offload {trainer.offload}" if trainer.offload != "none" else ""
        each = f" of {self.tensor_parallel} GPUs" if self.tensor_parallel > 1 else ""
        each += f", {self.engines} engines each" if self.engines > 1 else ""
        replicas = f"{self.all_replicas} replicas{' on the same GPUs' if self.borrowed else ''}{each}"
        replicas += ", under CUDA MPS" if self.mps else ""
        scoring = f"reward models on {self.scoring}" if self.scoring else ""
        return "; ".join(filter(None, (train, replicas, scoring)))


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryShortage:
    layout: str
    needed_bytes: float
    limit_bytes: float
    component: Component
    """The largest that a setting reduces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    layout: GpuLayout
    memory: Mapping[str, Table]
    """By side: trainer, rollout; or shared alone; or both, and of these the engines."""
    kept_layers: int
    max_groups: int
    """That one replica decodes at a time, as far as its cache holds them."""
    rates: Rates
    estimate_s: float
    utilization: float = 0.0
    """rollout.vllm.gpu_memory_utilization; 0: the run's own."""
    outcome: SimulatedFigures | None = None

    @property
    def step_s(self) -> float:
        """Simulated if it was, else estimated."""
        return self.outcome.step_s if self.outcome else self.estimate_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Turns:
    """Trainer and replicas that use the same GPUs in turn."""

    rung: int
    table: Table
    groups: int
    """Of a replica at a time; 0: they do not fit."""
    utilization: float
    """rollout.vllm.gpu_memory_utilization; 0: the run's own."""
    moved_bytes: float = 0.0
    """Of optimizer states on each GPU, to the host for generation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Preferences:
    """The run's own settings, which are tried first."""

    trainer: TrainerOptions
    max_groups: int = 16
    utilization: float = 0.85
    reward_replicas: int = 1
    transport: str = "pull"
    placements: Sequence[Placement] = PLACEMENTS


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """Compares layouts of one workload on one cluster."""

    work: Workload
    cluster: Cluster
    own: Preferences
    corrections: Corrections = dataclasses.field(default_factory=Corrections)
    exhaustive: bool = False
    """Simulate every layout, not only those with the best estimates (benchmarks/runs/plan_sweep.py)."""

    @property
    def limit_bytes(self) -> float:
        """Of one GPU."""
        return USABLE * self.cluster.gpu.memory_bytes

    @property
    def _freed_limit_bytes(self) -> float:
        return _USABLE_FREED * self.cluster.gpu.memory_bytes

    def compare(self) -> tuple[list[Candidate], list[MemoryShortage]]:
        """Return the simulated layouts, fastest first, and what does not fit."""
        candidates: list[Candidate] = []
        problems: list[MemoryShortage] = []
        for placement in self.own.placements:
            for outcome in self._of(placement):
                (candidates if isinstance(outcome, Candidate) else problems).append(outcome)  # type: ignore[arg-type]
        candidates.sort(key=lambda candidate: (candidate.estimate_s, candidate.layout.gpus))
        chosen = candidates if self.exhaustive else _varied(candidates)
        return sorted(map(self.simulated, chosen), key=_pace), _distinct(problems)

    def as_set(self, layout: GpuLayout, rung: int | None = None) -> Candidate:
        """Return a layout whose replicas decode as many groups as the run's settings say, whether it fits or not; where GPUs
        are shared in turn on ``rung``, if it is known."""
        beside_bytes = 0.0
        if layout.placement == "shared":
            turns = self._turns(layout.trainer, layout.tensor_parallel, layout.engines)
            known = turns.rung if rung is None else min(rung, len(_SWITCH_S) - 1)
            layout = dataclasses.replace(
                layout, rung=known, moved_bytes=turns.moved_bytes if known == turns.rung else 0.0
            )
            beside_bytes = layout.engines * _CONTEXT_ASLEEP
        _, kept = trainer_table(self.work, layout.trainer, self.limit_bytes - beside_bytes)
        groups = self.wanted(layout.all_replicas)
        return self.simulated(self._candidate(layout, {}, kept, groups))

    def simulated(self, candidate: Candidate, *, record: bool = False, steps: int = 0) -> Candidate:
        turn = 3 * self.work.max_lag + 3  # a third of the steps is not counted, nor are the last max_lag
        steps = steps or max(6, turn, min(15, _MOST_GROUPS // (self.work.groups or 1)))
        outcome = simulate(self.work, candidate.rates, self._side(candidate), steps, record=record)
        return dataclasses.replace(candidate, outcome=outcome)

    def _side(self, candidate: Candidate) -> Side:
        layout = candidate.layout
        return Side(layout.replicas, candidate.max_groups, layout.borrowed, self.own.reward_replicas)

    def _of(self, placement: Placement) -> Iterator[Candidate | MemoryShortage]:
        if placement == "at once":
            yield from self._at_once() if self.cluster.nodes == 1 and not self.work.scoring else ()
            return
        scoring = scoring_memory(self.work)
        if total(scoring) > self.limit_bytes:
            yield _problem("the reward service's models", {"score": scoring}, self.limit_bytes)
            return
        sizes = self._trainer_sizes(placement)
        if (misfit := self._as_set(max(sizes, default=1))) is not None:
            yield misfit
        for ranks in sizes:
            if placement == "shared":
                yield from self._shared(ranks)
            else:
                yield from self._separate(ranks)

    def _trainer_sizes(self, placement: Placement) -> Sequence[int]:
        gpus, each = self._gpus(placement), self.cluster.per_node
        if placement == "shared":
            return (gpus,) if gpus else ()
        return range(1, gpus) if self.cluster.nodes == 1 else range(each, gpus, each)

    def _scoring_gpus(self, placement: Placement) -> int:
        """Return the GPUs that the reward service's models have for themselves."""
        return self.own.reward_replicas if self.work.scoring and not self._scores_in_turns(placement) else 0

    def _gpus(self, placement: Placement) -> int:
        """Return the GPUs of trainer and replicas; those of several hosts are whole hosts, beside the reward service's."""
        return max(0, self.cluster.gpus - (self._scoring_gpus(placement) if self.cluster.nodes == 1 else 0))

    # ---------------------------------------------------------------- memory

    def _mine(self, ranks: int, copies: int = 2) -> TrainerOptions:
        own, snapshots = self.own.trainer, copies if self.own.transport == "pull" else 0
        return dataclasses.replace(own, ranks=ranks, snapshots=snapshots, sharded=own.sharded and ranks > 1)

    def _options(self, ranks: int, copies: int) -> Iterator[list[TrainerOptions]]:
        """Yield the trainer's settings: with the run's own optimizer and offloading first, then with those that need less
        memory. Within each, ZeRO stages and transports."""
        mine = self._mine(ranks, copies)
        transports = tuple(dict.fromkeys((mine.snapshots, 0)))
        ways = [(mine.optimizer, mine.offload), *_WAYS]
        for optimizer, offload in dict.fromkeys(ways):
            stages = (3,) if offload == "all" else (1, 2, 3) if ranks > 1 else (max(1, mine.zero_stage),)
            way = dataclasses.replace(mine, optimizer=optimizer, offload=offload)
            own = [mine] if way == mine else []
            others = itertools.product(stages, transports)
            yield own + [dataclasses.replace(way, zero_stage=stage, snapshots=pulled) for stage, pulled in others]

    def _trainers(
        self, ranks: int, beside_bytes: float = 0.0, copies: int = 2, *, in_turn: bool = False
    ) -> Iterator[tuple[TrainerOptions, Table, int] | MemoryShortage]:
        """Yield the settings that fit, of the first optimizer and offloading with which any do, or why none does;
        ``in_turn``: the trainer can free its snapshot while it trains."""
        limit_bytes = self.limit_bytes - beside_bytes
        for together in self._options(ranks, copies):
            fits = False
            for options in dict.fromkeys(together):
                table, kept = trainer_table(self.work, options, limit_bytes)
                usable_bytes = limit_bytes
                if in_turn and options.snapshots and peak(table) > limit_bytes:
                    table, usable_bytes = _without_snapshots(table), self._freed_limit_bytes - beside_bytes
                if peak(table) <= usable_bytes:
                    fits = True
                    yield options, table, kept
            if fits:
                return
        table, _ = trainer_table(self.work, self._mine(ranks), limit_bytes)
        yield _problem(_words(self._mine(ranks)), table, limit_bytes)

    def _as_set(self, ranks: int) -> MemoryShortage | None:
        """Return why the run's own settings do not fit on ``ranks`` GPUs, if they do not."""
        options = self._mine(ranks)
        table, _ = trainer_table(self.work, options, self.limit_bytes)
        return None if peak(table) <= self.limit_bytes else _problem(_words(options), table, self.limit_bytes)

    def _parallel_sizes(self, gpus: int) -> list[int]:
        sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= gpus and gpus % size == 0]
        return [size for size in sizes if size <= self.cluster.per_node or size % self.cluster.per_node == 0]

    def wanted(self, replicas: int) -> int:
        """Return the groups that a replica would have at a time."""
        return max(1, min(self.own.max_groups, -(-self.work.slots // max(1, replicas))))

    def _engine(
        self, replicas: int, parallel: int, engines: int, room: float, less: int = 1, *, in_turn: bool = False
    ) -> tuple[EngineMemory, int, bool]:
        """Return memory, groups at a time (0: not even one fits), and whether there is a shadow: not where devices are
        used in turn, as weights arrive while generation is paused."""
        most_groups = -(-self.wanted(replicas) // less)
        group_tokens = self.work.prompt_tokens + self.work.group_size * self.work.lengths.mean
        needed = max(float(self.work.longest), min(1, most_groups) * group_tokens)
        for shadow in (False,) if in_turn else (True, False) if engines == 1 else (True,):
            options = EngineOptions(
                parallel, engines, self.own.utilization, most_groups * self.work.group_size, shadow=shadow
            )
            memory = engine_memory(self.work, options, room, self.cluster.gpu.memory_bytes)
            if memory.cached_tokens >= needed:
                return memory, min(most_groups, int(memory.cached_tokens // group_tokens)), shadow
        return memory, 0, False

    # ---------------------------------------------------------------- placements

    def _separate(self, ranks: int) -> Iterator[Candidate | MemoryShortage]:
        for trainer in self._trainers(ranks):
            if isinstance(trainer, MemoryShortage):
                yield trainer
            else:
                yield from self._with_engines(*trainer)

    def _with_engines(self, options: TrainerOptions, table: Table, kept: int) -> Iterator[Candidate | MemoryShortage]:
        gpus = self._gpus("separate") - options.ranks
        for parallel in self._parallel_sizes(gpus):
            replicas = gpus // parallel
            for engines in self._engine_counts(parallel):
                memory, groups, shadow = self._engine(replicas, parallel, engines, self.limit_bytes)
                if not groups:
                    yield _problem(f"an engine on {parallel} GPUs", {"generate": memory.components}, self.limit_bytes)
                    continue
                layout = GpuLayout("separate", options, parallel, replicas, engines, shadow=shadow)
                tables: dict[str, Table] = {"trainer": table, "rollout": {"generate": memory.components}}
                yield self._candidate(layout, tables, kept, groups)

    def _shared(self, ranks: int) -> Iterator[Candidate | MemoryShortage]:
        for trainer in self._trainers(ranks, _CONTEXT_ASLEEP, copies=1, in_turn=True):
            if isinstance(trainer, MemoryShortage):
                yield dataclasses.replace(trainer, layout=f"shared: {trainer.layout}")
                continue
            options, _, kept = trainer
            tables = []
            for parallel, engines in self._engines_in_turn(ranks):
                turns = self._turns(options, parallel, engines)
                tables.append(turns.table)
                if turns.groups:
                    borrowed, several = ranks // parallel, engines > 1
                    layout = GpuLayout(
                        "shared", options, parallel, 0, engines, several, borrowed, turns.rung, turns.moved_bytes,
                        shadow=False,
                    )  # fmt: skip
                    made = self._candidate(layout, {"shared": turns.table}, kept, turns.groups)
                    yield dataclasses.replace(made, utilization=turns.utilization)
            if all(peak(table) > self.limit_bytes for table in tables):
                yield _problem(f"shared: {_words(options)}, in turn", min(tables, key=peak), self.limit_bytes)

    def _engines_in_turn(self, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield the GPUs of a replica, and the engines on each."""
        for parallel in self._parallel_sizes(ranks):
            yield from ((parallel, engines) for engines in self._engine_counts(parallel))

    def _turns(self, options: TrainerOptions, parallel: int, engines: int) -> "_Turns":
        """Return the lowest rung on which trainer, engines and scoring models fit by turns, if they do on any."""
        replicas = options.ranks // parallel
        scoring = scoring_memory(self.work) if self.work.scores_in_turns else []
        idle = [Component("reward service", CONTEXT)] if scoring else []
        for rung in range(4):
            trainer, _ = trainer_table(self.work, options, self.limit_bytes - engines * _CONTEXT_ASLEEP)
            limit_bytes = self.limit_bytes
            if options.snapshots and rung >= _FREES_SNAPSHOTS:
                trainer, limit_bytes = _without_snapshots(trainer), self._freed_limit_bytes
            waiting = [part for part in trainer["wait"] if rung < 3 or part.name not in _STATES] + idle
            room = self.limit_bytes - total(waiting)
            memory, groups, _ = self._engine(replicas, parallel, engines, room, in_turn=True)
            utilization = 0.0
            if engines > 1:
                started = EngineOptions(1, engines, sequences=groups * self.work.group_size, shadow=False)
                memory, utilization = several_engines(self.work, started, memory, self.cluster.gpu.memory_bytes)
            moved = 0.0
            if rung == 3:
                lacking = (
                    total(memory.components) + total(trainer["wait"]) - USABLE_IN_TURNS * self.cluster.gpu.memory_bytes
                )
                states, moved = _after_moving(trainer["wait"], lacking)
                waiting += states
            stays = _staying(memory, rung, engines)
            busy: dict[Phase, Components] = {
                phase: [*parts, stays, *idle] for phase, parts in trainer.items() if phase != "wait"
            }
            if scoring:
                busy["score"] = [Component("trainer, waiting", total(waiting) - total(idle)), stays, *scoring]
            table: Table = {
                **busy,
                "generate": [*memory.components, Component("trainer, waiting", total(waiting) - total(idle)), *idle],
            }
            enough = 2 * groups >= self.wanted(replicas) or rung == 3
            if groups and enough and peak(table) <= limit_bytes:
                return _Turns(rung, table, groups, utilization, moved)
        return _Turns(rung, table, 0, 0.0)

    def _at_once(self) -> Iterator[Candidate | MemoryShortage]:
        """Yield layouts where a rank and a replica work on each GPU at the same time: with the run's optimizer, and with
        room for all groups, or for as many as fit. A large model's generation fills the GPU by itself."""
        for engines in self._engine_counts(1) if self.work.shape.weights < _SMALL else ():
            for less in (1, 2, 4):
                outcomes = list(self._beside(engines, less))
                if isinstance(outcomes[0], Candidate):
                    break
            yield from outcomes

    def _beside(self, engines: int, less: int) -> Iterator[Candidate | MemoryShortage]:
        """Yield the trainer's settings that fit beside ``engines``, or why none does."""
        gpus = self.cluster.gpus
        memory, groups, _ = self._engine(gpus, 1, engines, self.limit_bytes, less)
        if not groups:
            yield _problem(
                f"an engine of {engines} beside the trainer", {"generate": memory.components}, self.limit_bytes
            )
            return
        options = EngineOptions(1, engines, sequences=groups * self.work.group_size)
        memory, share = several_engines(self.work, options, memory, self.cluster.gpu.memory_bytes)
        aside = Component("engines", total(memory.components), "lower rollout.max_groups or rollout.engines_per_gpu")
        limit_bytes, fits = self.limit_bytes - aside.nbytes, False
        for used in dict.fromkeys(next(self._options(gpus, 2))):
            table, kept = trainer_table(self.work, used, limit_bytes)
            if peak(table) <= limit_bytes:
                fits = True
                tables: dict[str, Table] = {"both": _with(table, aside), "engines": {"generate": memory.components}}
                layout = GpuLayout("at once", used, 1, 0, engines, mps=True, borrowed=gpus)
                yield dataclasses.replace(self._candidate(layout, tables, kept, groups), utilization=share)
        if not fits:
            mine = self._mine(gpus)
            own, _ = trainer_table(self.work, mine, limit_bytes)
            yield _problem(f"at once: {_words(mine)}, {engines} engines", _with(own, aside), self.limit_bytes)

    def _engine_counts(self, parallel: int) -> tuple[int, ...]:
        small = parallel == 1 and self.work.shape.weights < _SMALL
        return (1, 2, 3) if small else (1,)

    # ---------------------------------------------------------------- rates

    def _candidate(self, layout: GpuLayout, memory: Mapping[str, Table], kept: int, groups: int) -> Candidate:
        rates = self.rates(layout, kept, groups)
        if scoring := self._scoring_gpus(layout.placement):
            layout = dataclasses.replace(layout, scoring=scoring)
            memory = {**memory, "reward": {"score": scoring_memory(self.work)}}
        return Candidate(layout, memory, kept, groups, rates, self._estimate(layout, rates, groups))

    def rates(self, layout: GpuLayout, kept: int, groups: int) -> Rates:
        """Return the rates of a layout whose replicas decode ``groups`` at a time."""
        work, cluster, trainer, corrected = self.work, self.cluster, layout.trainer, self.corrections
        most, at_once = max(2.0, float(groups * work.group_size)), layout.placement == "at once"
        few, many = (
            rooflines.decode_seconds(
                work, cluster, layout.tensor_parallel, layout.engines, sequences, mps=layout.mps, host=corrected.host
            )
            for sequences in (most / 8, most)
        )
        slope = (many - few) / (most - most / 8)
        passes = rooflines.train_seconds(work, cluster, trainer, kept, work.step_tokens)
        prefill_s = rooflines.prefill_seconds(work, cluster, layout.tensor_parallel)
        moved = rooflines.update_seconds(work, cluster, trainer)
        score_s, turn_s = corrected.score_s or rooflines.scoring_seconds(work, cluster), 0.0
        if self._scores_in_turns(layout.placement):
            loaded = sum(model.nbytes for model in work.scoring)
            turn_s = work.groups * score_s + loaded / cluster.host_bytes_per_s
        return Rates(
            decode_s=max(few - slope * (most / 8 - 1), 1e-6) * corrected.decode,
            sequence_s=slope * corrected.decode,
            prefill_s=work.prompt_tokens * prefill_s,
            again_s=prefill_s if layout.borrowed and layout.rung and layout.placement != "at once" else 0.0,
            train_s=moved * corrected.update + turn_s,
            token_s=passes / work.step_tokens * corrected.train,
            transfer_s=rooflines.transfer_seconds(work, cluster, trainer, layout.all_replicas, layout.copies),
            score_s=0.0 if turn_s else score_s,
            switch_s=self._switch_s(layout),
            bus_s=corrected.bus_s
            or rooflines.BUS_GROUP_S
            + work.group_size * work.lengths.mean * rooflines.TOKEN_BYTES / rooflines.BUS_BYTES_PER_S,
            beside=rooflines.speed_beside_training(work, cluster, layout.engines, most, host=corrected.host)
            if at_once
            else 0.0,
        )

    def _scores_in_turns(self, placement: Placement) -> bool:
        return placement == "shared" and self.work.scores_in_turns

    def _switch_s(self, layout: GpuLayout) -> float:
        if not layout.borrowed or layout.placement == "at once":
            return 0.0
        return self.corrections.switch * (
            _SWITCH_S[layout.rung] + 2 * layout.moved_bytes / self.cluster.host_bytes_per_s
        )

    def _estimate(self, layout: GpuLayout, rates: Rates, groups: int) -> float:
        """Return a step's seconds without waiting for the last group, to choose what is simulated."""
        work = self.work
        train_s = rates.step(work.step_tokens) + rates.switch_s
        sequences = min(groups * work.group_size, work.slots * work.group_size / layout.all_replicas)
        speed = sequences / rates.decoding(sequences)
        tokens = work.samples * work.lengths.mean
        generate_s = tokens / (layout.all_replicas * speed)
        return train_s + generate_s if work.max_lag == 0 or layout.borrowed else max(train_s, generate_s)


def _pace(candidate: Candidate) -> tuple[float, int]:
    return candidate.step_s, candidate.layout.gpus


def _varied(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest layouts, among them the fastest of each placement and number of engines."""
    best = {(each.layout.placement, each.layout.engines): each for each in reversed(candidates)}
    chosen = [*candidates[:_SIMULATED]]
    return chosen + [candidate for candidate in best.values() if candidate not in chosen]


def _after_moving(waiting: Components, lacking_bytes: float) -> tuple[list[Component], float]:
    """Return the optimizer states that stay at rung 3, and the bytes that are moved: whole storages, one for master weights
    and one for each moment (services/trainer/model/memory/residency.py)."""
    sizes = {part.name: part.nbytes for part in waiting if part.name in _STATES}
    masters, moment = sizes.get("master weights", 0.0), sizes.get("moments", 0.0) / 2
    storages = (masters, moment, moment)
    moved_bytes, stay_bytes = (
        sum(storages[place] for place in places) for places in moved_and_staying(storages, lacking_bytes)
    )
    return [Component("optimizer states that stay", stay_bytes)] if stay_bytes else [], moved_bytes


def _staying(memory: EngineMemory, rung: int, engines: int) -> Component:
    gone = {
        0: (),
        1: ("key-value cache",),
        2: ("key-value cache", "weights", "shadow", "graphs and logits", "set aside"),
    }[min(2, rung)]
    stays = sum(part.nbytes for part in memory.components if part.name not in gone)
    name = "engine" if engines == 1 else "engines"
    return Component(f"{name}, asleep" if rung else name, max(stays, engines * _CONTEXT_ASLEEP))


def _words(options: TrainerOptions) -> str:
    more = ", 8-bit Adam" if options.optimizer == "adamw_8bit" else ""
    more += f", offload {options.offload}" if options.offload != "none" else ""
    return f"a trainer on {options.ranks} GPUs, ZeRO {options.zero_stage}{more}"


def _without_snapshots(table: Table) -> Table:
    """Return the trainer's memory if its snapshot is away while it trains."""
    return {
        phase: [part for part in parts if phase == "wait" or part.name != "snapshots"] for phase, parts in table.items()
    }


def _with(table: Table, component: Component) -> Table:
    return {phase: [*parts, component] for phase, parts in table.items()}


def _problem(layout: str, table: Table, limit_bytes: float) -> MemoryShortage:
    phase = max(table.values(), key=total)
    largest = max((part for part in phase if part.advice), key=lambda part: part.nbytes)
    return MemoryShortage(layout, total(phase), limit_bytes, largest)


def _distinct(problems: Sequence[MemoryShortage]) -> list[MemoryShortage]:
    return list({(problem.layout): problem for problem in problems}.values())
