"""A plan as text for people and as JSON for programs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tomli_w

from penstock.services.plan.hardware import GIB, Cluster
from penstock.services.plan.layouts import Candidate, GpuLayout, MemoryShortage, Planner
from penstock.services.plan.memory import Table, peak, total
from penstock.services.plan.workload import Workload
from penstock.shared.errors import SettingsError
from penstock.shared.settings import loads

SHOWN = 3
_PROBLEMS = 5
_IDLE, _BUSY = 0.15, 0.7
_TRIED_RANKS = {"at once": 4, "shared": 4}
"""Ranks of trainers that shared their GPUs with a replica on each, by placement (docs/plan.md)."""
_TRIED_SHARES = 2
"""Ranks from which replicas with GPUs of their own pulled shares of a version (docs/weights.md)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    planner: Planner
    candidates: Sequence[Candidate]
    problems: Sequence[MemoryShortage]

    @property
    def best(self) -> Sequence[Candidate]:
        """The fastest; of those that differ in ZeRO's stage or the way of weights, and what follows from these, one."""
        distinct: dict[GpuLayout, Candidate] = {}
        for candidate in self.candidates:
            trainer = dataclasses.replace(candidate.layout.trainer, zero_stage=0, snapshots=0, sharded=False)
            alike = dataclasses.replace(candidate.layout, trainer=trainer, rung=0, moved_bytes=0.0, shadow=True)
            distinct.setdefault(alike, candidate)
        return list(distinct.values())[:SHOWN]


def accepted(layout: GpuLayout, cluster: Cluster, work: Workload) -> bool:
    """Whether the settings accept a layout with vLLM, whose rates the plan assumes; devices are shared in turn on one
    host. Each rank of a trainer loads the whole policy before it keeps a part.
    """
    if work.policy_bytes > cluster.gpu.memory_bytes:
        return False
    if layout.placement in ("separate", "at once"):
        return True
    return cluster.nodes == 1 and _in_turn(
        layout.placement,
        layout.engines,
        layout.tensor_parallel,
        layout.trainer.ranks,
        layout.borrowed,
    )


@functools.cache
def _in_turn(placement: str, engines: int, tensor_parallel: int, ranks: int, replicas: int) -> bool:
    """Whether the settings accept ``replicas`` with ``engines`` each that use the trainer's GPUs in turn."""
    rollout = {
        "engines_per_gpu": engines,
        "replicas": replicas,
        "vllm": {"tensor_parallel_size": tensor_parallel},
    }
    try:
        loads(
            tomli_w.dumps({"placement": {"mode": placement}, "trainer": {"ranks": ranks}, "rollout": rollout}),
            "",
        )
    except SettingsError:
        return False
    return True


def _reservation(layout: GpuLayout, cluster: Cluster, work: Workload) -> str:
    """Return what the plan's line says of a layout that cannot be run, or was not (docs/placement.md)."""
    if not accepted(layout, cluster, work):
        return " (not supported yet)"
    ranks = _TRIED_RANKS.get(layout.placement)
    one_each = layout.tensor_parallel == 1 and (layout.engines == 1 or layout.placement == "at once")
    tried = ranks is None or (one_each and layout.trainer.ranks <= ranks)
    return "" if tried else " (not verified on GPUs)"


def text(plan: Plan) -> str:
    lines = [_head(plan.planner)]
    for number, candidate in enumerate(plan.best, 1):
        lines += ["", *_candidate(plan, number, candidate)]
    if not plan.candidates:
        lines += ["", "No layout fits."]
        if not plan.problems and plan.planner.work.scoring:
            lines += ["Reward models need a GPU of their own: add one, or set reward.models.device."]
    if plan.problems:
        lines += ["", "Does not fit:"]
        lines += [f"  {_refusal(problem)}" for problem in plan.problems[:_PROBLEMS]]
    if unknown := plan.planner.work.unknown:
        lines += ["", f"Not counted, as no config.json of it is here: {', '.join(unknown)}."]
    return "\n".join(lines)


def _head(planner: Planner) -> str:
    work, cluster = planner.work, planner.cluster
    trained = f", of which LoRA trains {work.trained / 1e6:,.0f}M" if work.lora_rank else ""
    return (
        f"{work.shape.name} ({work.shape.weights / 1e9:.2f}B weights{trained}) on {cluster.words}: {work.groups} groups of "
        f"{work.group_size} samples a step, max_lag {work.max_lag}\n"
        f"prompts of {work.prompt_tokens:,} tokens{'' if work.counts_prompts else ' (estimated)'}, completions of {work.lengths.mean:,.0f}, at most {work.lengths.most:,}; "
        f"{planner.limit_bytes / GIB:.1f} GiB usable on a GPU"
    )


def _candidate(plan: Plan, number: int, candidate: Candidate) -> list[str]:
    planner, layout, outcome = plan.planner, candidate.layout, candidate.outcome
    assert outcome is not None
    hours = planner.work.steps * outcome.step_s * layout.gpus / 3600
    lags = ", ".join(f"{lag}: {share:.0%}" for lag, share in outcome.lags.items())
    lines = [
        f"{number}. {layout.placement}{_reservation(layout, planner.cluster, planner.work)}: {layout.words}",
        f"   {outcome.step_s:,.1f} s a step, {outcome.samples_per_s:,.1f} samples/s, {hours:,.0f} GPU-hours for "
        f"{planner.work.steps} steps; idle: trainer {outcome.trainer_idle:.0%}, replicas {outcome.rollout_idle:.0%}; lag {lags}",
        f"   {_weights(candidate)}",
    ]
    for side, table in candidate.memory.items():
        lines += [f"   {side}, {_phase(phase, table)}" for phase in table]
    return [*lines, f"   {reason(plan, candidate)}"]


def _weights(candidate: Candidate) -> str:
    layout, trainer = candidate.layout, candidate.layout.trainer
    tried = layout.placement == "separate" and trainer.ranks <= _TRIED_SHARES
    pulled = f"pulled from all ranks{'' if tried else ' (not verified on GPUs)'}" if trainer.sharded else "pulled"
    way = pulled if trainer.snapshots else "by file"
    seconds, step_s = candidate.rates.transfer_s, candidate.step_s
    return f"weights, {way}: live after {seconds:,.1f} s, {seconds / step_s:.0%} of a step"


def _phase(phase: Any, table: Table) -> str:
    parts = sorted(table[phase], key=lambda part: -part.nbytes)
    named = ", ".join(f"{part.name} {part.nbytes / GIB:.1f}" for part in parts if part.nbytes >= 0.05 * GIB)
    return f"{phase} {total(table[phase]) / GIB:.1f} GiB: {named}"


def reason(plan: Plan, candidate: Candidate) -> str:
    outcome, first = candidate.outcome, plan.candidates[0]
    assert outcome is not None
    slower = candidate.step_s / first.step_s
    place = "Fastest" if candidate is first else f"{slower:.2f} times the fastest's step"
    shares = {
        "the source of weights": outcome.source_busy,
        "the bus": outcome.bus_busy,
        "the coordinator": outcome.coordinator_busy,
    }
    full = [f"{name} is busy {share:.0%} of the time" for name, share in shares.items() if share > _BUSY]
    if full:
        return f"{place}; {' and '.join(full)}."
    if outcome.trainer_idle < _IDLE:
        return f"{place}; trainer-bound: more replicas would not help."
    if candidate.layout.placement == "at once":
        who, rest = (
            ("the trainer waits", "its GPU while it trains")
            if candidate.layout.gpus == 1
            else ("the ranks wait", "their GPUs while they train")
        )
        return f"{place}; {who} {outcome.trainer_idle:.0%}, and generation takes from {rest}."
    if candidate.layout.placement == "shared":
        return f"{place}; the GPUs take turns, {outcome.trainer_idle:.0%} of the time without training."
    return f"{place}; rollout-bound: the trainer waits {outcome.trainer_idle:.0%}."


def _refusal(problem: MemoryShortage) -> str:
    part = problem.component
    return (
        f"{problem.layout}: {problem.needed_bytes / GIB:,.0f} of {problem.limit_bytes / GIB:.0f} GiB, "
        f"{part.nbytes / GIB:,.0f} of them {part.name}: {part.advice}"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    work, cluster = plan.planner.work, plan.planner.cluster
    return {
        "model": work.shape.name,
        "weights": work.shape.weights,
        "cluster": cluster.words,
        "limit_bytes": plan.planner.limit_bytes,
        "layouts": [_entry(plan, candidate) for candidate in plan.candidates],
        "problems": [dataclasses.asdict(problem) for problem in plan.problems],
    }


def _entry(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    assert candidate.outcome is not None
    outcome = dataclasses.asdict(candidate.outcome)
    del outcome["spans"]
    memory = {
        side: {phase: {part.name: part.nbytes for part in parts} for phase, parts in table.items()}
        for side, table in candidate.memory.items()
    }
    return {
        **dataclasses.asdict(candidate.layout),
        "words": candidate.layout.words,
        "accepted": accepted(candidate.layout, plan.planner.cluster, plan.planner.work),
        "gpus": candidate.layout.gpus,
        "gpu_hours": plan.planner.work.steps * candidate.step_s * candidate.layout.gpus / 3600,
        "reason": reason(plan, candidate),
        "memory_bytes": memory,
        "peak_bytes": {side: peak(table) for side, table in candidate.memory.items()},
        "rates": dataclasses.asdict(candidate.rates),
        "outcome": outcome,
    }
