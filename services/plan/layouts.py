"""The layouts of a run on a cluster: which fit, and how fast each is.

``separate``: trainer and replicas have GPUs of their own. ``shared``: they take turns on the same GPUs. ``at once``: a
rank and a replica of a small model on each GPU, under CUDA MPS. ``alone``: the trainer of demonstrations or pairs. In
turn, the engines give way on the lowest rung that fits:

    0 it keeps all its memory · 1 without its cache · 2 without its weights · 3 and the optimizer's state goes to the host
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from penstock.services.plan import rates as rooflines
from penstock.services.plan.hardware import GIB, Cluster
from penstock.services.plan.measured import Corrections
from penstock.services.plan.memory import (
    Component,
    EngineMemory,
    EngineOptions,
    Table,
    TrainerOptions,
    engine_memory,
    optimizer_states,
    peak,
    several_engines,
    total,
    trainer_table,
)
from penstock.services.plan.pace import GpuLayout, Pace, Replicas, counted, pace, trainer_words
from penstock.services.plan.rates import Rates
from penstock.services.plan.shortage import MemoryShortage, on_gpu, on_host
from penstock.services.plan.workload import Workload

USABLE = 0.95
"""Of a GPU's memory; the rest is fragmentation."""
_SMALL = 6.5e9
"""Weights below which one engine leaves a GPU idle (services/rollout/engines/vllm/several/plan.py)."""
_WAYS = (("adamw", "none"), ("adamw_8bit", "none"), ("adamw", "optimizer"), ("adamw", "all"))
"""Optimizers and offloading, in the order of what they cost."""
_SWITCH_S = (0.05, 0.3, 0.8, 0.8)
"""Both ways, by rung; rung 3 also moves the optimizer's state."""
_FREES_SNAPSHOTS, _USABLE_FREED = 2, 0.93
"""The rung from which the trainer of ``shared`` has no snapshot while it trains (services/trainer/rank0/publication.py), and
what is usable where it comes and goes (benchmarks/results/2026-11-24-7b-one-gpu-h200.json)."""
_STATES = ("master weights", "moments")
_CONTEXT_ASLEEP = 3.0 * GIB
"""What a sleeping vLLM engine keeps (2.9 GiB of 139.9 on an H200)."""
_FREED = ("key-value cache", "weights", "graphs and logits")
_GONE: Sequence[Sequence[str]] = ((), _FREED[:1], _FREED, _FREED)
"""Of the engine, while the trainer trains, by rung."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    layout: GpuLayout
    memory: Mapping[str, Table]
    """By side: trainer and rollout; or shared; or both, and of these the engines."""
    max_groups: int
    """That one replica decodes at a time, as far as its cache holds them."""
    rates: Rates
    pace: Pace
    utilization: float = 0.0
    """rollout.vllm.gpu_memory_utilization; 0: the run's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Preferences:
    """The run's own settings, which are tried first."""

    trainer: TrainerOptions
    max_groups: int = 16
    utilization: float = 0.85


@dataclasses.dataclass(frozen=True, slots=True)
class _Engine:
    memory: EngineMemory
    groups: int
    """Of a replica at a time; 0: not even one fits."""
    shadow: bool
    utilization: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """Compares layouts of one workload on one cluster."""

    work: Workload
    cluster: Cluster
    own: Preferences
    corrections: Corrections = dataclasses.field(default_factory=Corrections)

    @property
    def limit_bytes(self) -> float:
        """Of one GPU."""
        return USABLE * self.cluster.gpu.memory_bytes

    def compare(self) -> tuple[list[Candidate], list[MemoryShortage]]:
        """Return the layouts that fit, fastest first, and what does not fit."""
        generates = self.work.kind.generates
        outcomes = [*self._separate(), *self._shared(), *self._at_once()] if generates else [*self._alone()]
        candidates = [outcome for outcome in outcomes if isinstance(outcome, Candidate)]
        problems = {outcome.layout: outcome for outcome in outcomes if isinstance(outcome, MemoryShortage)}
        return sorted(candidates, key=lambda each: (each.pace.step_s, each.layout.gpus)), list(problems.values())

    def as_set(self, layout: GpuLayout) -> Candidate:
        """Return a layout whose replicas decode as many groups as the run's settings say, whether it fits or not."""
        beside_bytes = layout.engines * _CONTEXT_ASLEEP if layout.placement == "shared" else 0.0
        options = dataclasses.replace(layout.trainer, gpu_bytes=self.cluster.gpu.memory_bytes)
        _, kept = trainer_table(self.work, options, self.limit_bytes - beside_bytes)
        return self._candidate(layout, {}, kept, _Engine(EngineMemory((), 0.0), self.wanted(layout.replicas), True))

    def wanted(self, replicas: int) -> int:
        """Return the groups that a replica would have at a time."""
        return max(1, min(self.own.max_groups, -(-self.work.slots // max(1, replicas))))

    # ---------------------------------------------------------------- placements

    def _are_groups(self, ranks: int) -> bool:
        """Whether a host's ranks can compute samples together as ``trainer.sequence_parallel`` says."""
        return min(ranks, self.cluster.per_node) % self.own.trainer.sequence_parallel == 0

    def _ranks(self, below: int) -> Iterator[int]:
        """Yield the numbers of ranks: on several hosts, all GPUs of some."""
        each = 1 if self.cluster.nodes == 1 else self.cluster.per_node
        yield from filter(self._are_groups, range(each, below, each))

    def _alone(self) -> Iterator[Candidate | MemoryShortage]:
        """Yield the trainer on all GPUs, and on the half, a quarter, … of them."""
        gpus = self.cluster.gpus
        for ranks in self._ranks(gpus + 1):
            if gpus % ranks or gpus // ranks & (gpus // ranks - 1):
                continue
            trainer = self._trainer(ranks, self.limit_bytes)
            if isinstance(trainer, MemoryShortage):
                yield trainer
                continue
            options, table, kept = trainer
            layout = GpuLayout("alone", options, 1, 0)
            yield self._candidate(layout, {"trainer": table}, kept, _Engine(EngineMemory((), 0.0), 0, False))

    def _separate(self) -> Iterator[Candidate | MemoryShortage]:
        gpus = self.cluster.gpus
        for ranks in self._ranks(gpus):
            trainer = self._trainer(ranks, self.limit_bytes)
            if isinstance(trainer, MemoryShortage):
                yield trainer
                continue
            for parallel, engines in self._engines(gpus - ranks):
                replicas = (gpus - ranks) // parallel
                engine = self._engine(replicas, parallel, engines, self.limit_bytes)
                if not engine.groups:
                    table: Table = {"generate": engine.memory.components}
                    yield on_gpu(f"an engine on {counted(parallel, 'GPU')}", table, self.limit_bytes)
                    continue
                options, table, kept = trainer
                layout = GpuLayout("separate", options, parallel, replicas, engines, shadow=engine.shadow)
                sides: dict[str, Table] = {"trainer": table, "rollout": {"generate": engine.memory.components}}
                yield self._candidate(layout, sides, kept, engine)

    def _shared(self) -> Iterator[Candidate | MemoryShortage]:
        """Yield one engine by turns with the trainer; several were slower (benchmarks/results/2026-11-27-layouts-four-h200.json)."""
        ranks = self.cluster.gpus
        if not self._are_groups(ranks):
            return
        for parallel in dict.fromkeys(parallel for parallel, _ in self._engines(ranks)):
            outcomes = []
            for rung in range(len(_SWITCH_S)):
                outcomes.append(self._on_rung(ranks, parallel, rung))
                if isinstance(last := outcomes[-1], Candidate) and 2 * last.max_groups >= self.wanted(
                    last.layout.replicas
                ):
                    break
            yield next((each for each in reversed(outcomes) if isinstance(each, Candidate)), outcomes[-1])

    def _on_rung(self, ranks: int, parallel: int, rung: int) -> Candidate | MemoryShortage:
        """Return trainer and engine by turns, the engine giving way on ``rung``."""
        frees = rung >= _FREES_SNAPSHOTS
        limit_bytes = (_USABLE_FREED if frees else USABLE) * self.cluster.gpu.memory_bytes
        trainer = self._trainer(ranks, limit_bytes - _CONTEXT_ASLEEP, snapshots=1, frees=frees)
        if isinstance(trainer, MemoryShortage):
            return dataclasses.replace(trainer, layout=f"shared: {trainer.layout}")
        options, table, kept = trainer
        waiting = total([part for part in table["wait"] if rung < 3 or part.name not in _STATES])
        engine = self._engine(ranks // parallel, parallel, 1, self.limit_bytes - waiting, in_turn=True)
        stays = sum(part.nbytes for part in engine.memory.components if part.name not in _GONE[rung])
        beside = Component("engine, asleep" if rung else "engine", max(stays, _CONTEXT_ASLEEP))
        both: Table = {
            **{phase: [*held, beside] for phase, held in table.items() if phase != "wait"},
            "generate": [*engine.memory.components, Component("trainer, waiting", waiting)],
        }
        if not engine.groups or peak(both) > limit_bytes:
            return on_gpu(f"shared: a trainer on {trainer_words(options)}, in turn", both, limit_bytes)
        moved = on_host(
            f"shared: a trainer on {trainer_words(options)}", self.work, options, self.cluster, moves=rung == 3
        )
        if moved is not None:
            return moved
        layout = GpuLayout("shared", options, parallel, ranks // parallel, rung=rung, shadow=False)
        return self._candidate(layout, {"shared": both}, kept, engine)

    def _at_once(self) -> Iterator[Candidate | MemoryShortage]:
        """Yield a rank and a replica on each GPU, with room for all groups or for as many as fit. A large model's
        generation fills the GPU by itself."""
        if self.cluster.nodes > 1 or self.work.shape.weights >= _SMALL or not self._are_groups(self.cluster.gpus):
            return
        for _, engines in self._engines(1):
            outcomes = [self._beside(engines, less) for less in (1, 2, 4)]
            yield next((each for each in outcomes if isinstance(each, Candidate)), outcomes[0])

    def _beside(self, engines: int, less: int) -> Candidate | MemoryShortage:
        gpus = self.cluster.gpus
        engine = self._engine(gpus, 1, engines, self.limit_bytes, less)
        options = EngineOptions(1, engines, sequences=engine.groups * self.work.group_size)
        memory, share = several_engines(self.work, options, engine.memory, self.cluster.gpu.memory_bytes)
        engine = dataclasses.replace(engine, memory=memory, utilization=share)
        taken = Component(
            "engines", total(engine.memory.components), "lower rollout.max_groups or rollout.engines_per_gpu"
        )
        trainer = self._trainer(gpus, self.limit_bytes - taken.nbytes, ways=1)
        if isinstance(trainer, MemoryShortage) or not engine.groups:
            table, _ = trainer_table(self.work, self._mine(gpus), self.limit_bytes - taken.nbytes)
            name = f"at once: a trainer on {trainer_words(self._mine(gpus))}, {engines} engines"
            return on_gpu(name, _with(table, taken), self.limit_bytes)
        used, table, kept = trainer
        sides: dict[str, Table] = {"both": _with(table, taken), "engines": {"generate": engine.memory.components}}
        return self._candidate(GpuLayout("at once", used, 1, gpus, engines, mps=True), sides, kept, engine)

    # ---------------------------------------------------------------- memory

    def _mine(self, ranks: int) -> TrainerOptions:
        own = self.own.trainer
        gpu_bytes = self.cluster.gpu.memory_bytes
        together = own.expert_parallel if ranks % own.expert_parallel == 0 else 1
        sharded = own.sharded and ranks > 1
        return dataclasses.replace(own, ranks=ranks, sharded=sharded, gpu_bytes=gpu_bytes, expert_parallel=together)

    def _shares_of_experts(self, mine: TrainerOptions) -> tuple[int, ...]:
        """Return how many ranks may share the experts, and a critic's: as the run says, or all of a host that divide them."""
        work, rows = self.work, mine.sequence_parallel
        experts = {work.shape.experts, (work.critic or work.shape).experts}
        together = math.gcd(mine.ranks, self.cluster.per_node, *experts)
        is_refused = work.lora_rank or 0 in experts or (rows % together and together % rows)
        return (mine.expert_parallel,) if is_refused else (mine.expert_parallel, together)

    def _trainer(
        self, ranks: int, limit_bytes: float, *, snapshots: int = 2, frees: bool = False, ways: int = len(_WAYS) + 1
    ) -> tuple[TrainerOptions, Table, int] | MemoryShortage:
        """Return the fastest of the trainer's settings that fit, with its memory and the layers that it does not recompute:
        with the run's own optimizer and offloading, or else with those that need less memory; ``frees``: it can free its
        snapshot while it trains. Where no GPU holds whole snapshots beside it, each rank has a share of them.
        """
        mine = self._mine(ranks)
        mine = dataclasses.replace(mine, snapshots=min(mine.snapshots, snapshots))
        short: MemoryShortage | None = None
        for optimizer, offload in tuple(dict.fromkeys([(mine.optimizer, mine.offload), *_WAYS]))[:ways]:
            variants = _variants(
                dataclasses.replace(mine, optimizer=optimizer, offload=offload), mine, self._shares_of_experts(mine)
            )
            fitting = self._fitting(variants, limit_bytes, frees=frees)
            if mine.snapshots == 2 and ranks > 1 and not any(options.snapshots for _, options, _, _ in fitting):
                in_shares = [dataclasses.replace(each, sharded=True) for each in variants if each.snapshots]
                fitting += self._fitting(in_shares, limit_bytes)
            for _, options, table, kept in sorted(fitting, key=lambda each: each[0]):
                beyond = on_host(f"a trainer on {trainer_words(options)}", self.work, options, self.cluster)
                if beyond is None:
                    return options, table, kept
                short = short or beyond
        if short is not None:
            return short
        table, _ = trainer_table(self.work, mine, limit_bytes)
        return on_gpu(f"a trainer on {trainer_words(mine)}", table, limit_bytes)

    def _fitting(
        self, variants: Sequence[TrainerOptions], limit_bytes: float, *, frees: bool = False
    ) -> list[tuple[float, TrainerOptions, Table, int]]:
        """Return the variants that fit, each with the seconds of a step."""
        fitting = []
        for options in variants:
            table, kept = trainer_table(self.work, options, limit_bytes)
            if frees and peak(table) > limit_bytes:
                table = _without_snapshots(table)
            if peak(table) <= limit_bytes:
                fitting.append((self._train_seconds(options, kept), options, table, kept))
        return fitting

    def _train_seconds(self, options: TrainerOptions, kept: int) -> float:
        passes = rooflines.train_seconds(self.work, self.cluster, options, kept, self.work.step_tokens)
        return passes + rooflines.update_seconds(self.work, self.cluster, options)

    def _engines(self, gpus: int) -> Iterator[tuple[int, int]]:
        """Yield the GPUs of a replica, and the engines on each."""
        each = self.cluster.per_node
        for parallel in (1, 2, 4, 8, 16, 32):
            if parallel <= gpus and gpus % parallel == 0 and (parallel <= each or parallel % each == 0):
                small = parallel == 1 and self.work.shape.weights < _SMALL
                yield from ((parallel, engines) for engines in ((1, 2, 3) if small else (1,)))

    def _engine(
        self, replicas: int, parallel: int, engines: int, room: float, less: int = 1, *, in_turn: bool = False
    ) -> _Engine:
        """Return an engine's memory and groups; ``less``: a fraction of those that it would have."""
        most_groups, size = -(-self.wanted(replicas) // less), self.work.group_size
        group_tokens = self.work.prompt_tokens + size * self.work.sample_tokens
        needed = max(float(self.work.longest), group_tokens)
        for shadow in (False,) if in_turn else (True, False) if engines == 1 else (True,):
            options = EngineOptions(parallel, engines, self.own.utilization, most_groups * size, shadow=shadow)
            memory = engine_memory(self.work, options, room, self.cluster.gpu.memory_bytes)
            if memory.cached_tokens >= needed:
                return _Engine(memory, min(most_groups, int(memory.cached_tokens // group_tokens)), shadow)
        return _Engine(memory, 0, False)

    # ---------------------------------------------------------------- rates

    def _candidate(self, layout: GpuLayout, memory: Mapping[str, Table], kept: int, engine: _Engine) -> Candidate:
        rates = self._rates(layout, kept, engine.groups)
        in_turn, at_once = layout.placement == "shared", layout.placement == "at once"
        seconds = pace(self.work, rates, Replicas(layout.replicas, engine.groups, in_turn=in_turn, at_once=at_once))
        return Candidate(layout, memory, engine.groups, rates, seconds, engine.utilization)

    def _rates(self, layout: GpuLayout, kept: int, groups: int) -> Rates:
        """Return the rates of a layout whose replicas decode ``groups`` at a time."""
        work, cluster, trainer, corrected = self.work, self.cluster, layout.trainer, self.corrections
        train_s = rooflines.update_seconds(work, cluster, trainer) * corrected.update
        passes = rooflines.train_seconds(work, cluster, trainer, kept, work.step_tokens)
        token_s = passes / work.step_tokens * corrected.train
        if not layout.replicas:
            return Rates(0.0, 0.0, 0.0, train_s, token_s, 0.0)
        most, host = max(2.0, float(groups * work.group_size)), corrected.host
        few_s, many_s = (
            rooflines.decode_seconds(
                work, cluster, layout.tensor_parallel, layout.engines, sequences, mps=layout.mps, host=host
            )
            for sequences in (most / 8, most)
        )
        slope = (many_s - few_s) / (most - most / 8)
        beside, switch_s = 0.0, 0.0
        if layout.placement == "at once":
            beside = rooflines.speed_beside_training(work, cluster, layout.engines, most, host=host)
        elif layout.placement == "shared":
            states = optimizer_states(work.trained, work, trainer) if layout.rung == 3 else []
            moved = 2 * total(states) / cluster.host_bytes_per_s
            switch_s = corrected.switch * (_SWITCH_S[layout.rung] + moved)
        return Rates(
            decode_s=max(few_s - slope * (most / 8 - 1), 1e-6) * corrected.decode,
            sequence_s=slope * corrected.decode,
            prefill_s=work.read_tokens * rooflines.prefill_seconds(work, cluster, layout.tensor_parallel),
            train_s=train_s,
            token_s=token_s,
            transfer_s=rooflines.transfer_seconds(work, cluster, trainer, layout.replicas, layout.copies),
            switch_s=switch_s,
            beside=beside,
        )


def _variants(way: TrainerOptions, mine: TrainerOptions, shares: Sequence[int]) -> list[TrainerOptions]:
    """Return the ZeRO stages, transports and ``shares`` of experts of a way, the run's own first."""
    own = [mine] if (way.optimizer, way.offload) == (mine.optimizer, mine.offload) else []
    stages: Sequence[int] = (3,) if way.offload == "all" else (1, 2, 3) if way.ranks > 1 else (max(1, mine.zero_stage),)
    return own + [
        dataclasses.replace(way, zero_stage=stage, snapshots=snapshots, expert_parallel=together)
        for stage in stages
        for snapshots in dict.fromkeys((mine.snapshots, 0))
        for together in dict.fromkeys(shares)
    ]


def _without_snapshots(table: Table) -> Table:
    """Return the trainer's memory if its snapshot is away while it trains."""
    return {
        phase: [part for part in parts if phase == "wait" or part.name != "snapshots"] for phase, parts in table.items()
    }


def _with(table: Table, component: Component) -> Table:
    return {phase: [*parts, component] for phase, parts in table.items()}
