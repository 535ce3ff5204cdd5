"""A plan as text for people, as JSON for programs, and as the run's TOML file."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from penstock.services.plan import routes
from penstock.services.plan.hardware import GIB, Cluster
from penstock.services.plan.layouts import Candidate, Planner
from penstock.services.plan.memory import Table, offloaded_bytes, peak, total
from penstock.services.plan.pace import GpuLayout
from penstock.services.plan.rates import checkpoint_seconds
from penstock.services.plan.shortage import MemoryShortage, checkpoint_copy_bytes, offloaded_states_bytes
from penstock.services.plan.workload import Workload
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import write_whole
from penstock.shared.settings import RunKind, Settings, loads

SHOWN = 3
_PROBLEMS = 5
_BOUND = 0.15
"""Of a step that the trainer waits: with less, training bounds the run."""
_LEAST_COMPARED = 4.9e8
"""Weights of the smallest model whose plan was compared with runs (docs/plan.md)."""
_TRIED_RANKS = {"at once": 4, "shared": 4}
"""Ranks of trainers that shared their GPUs with a replica on each, by placement (docs/placement.md)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    settings: Settings
    planner: Planner
    candidates: Sequence[Candidate]
    problems: Sequence[MemoryShortage]

    def run_file(self, candidate: Candidate, given: Mapping[str, Any] | None = None) -> str:
        """Return the run's TOML file of the ``given`` tables, or of all settings, with this layout.

        Raises:
            SettingsError: this version does not support it.
        """
        if given is None:
            given = self.settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        cluster = self.planner.cluster
        if candidate.layout.placement == "shared" and cluster.nodes > 1:
            raise SettingsError("trainer and replicas take turns on one host alone")
        values = _run_values(given, self.settings, candidate, cluster)
        loads(tomli_w.dumps(_on_hosts(values, candidate.layout, cluster)), "run.toml")
        by_hand = "".join(f"# {line}\n" for line in _by_hand(candidate.layout, cluster))
        return f"{by_hand}{tomli_w.dumps(values)}"

    def refusal(self, candidate: Candidate) -> str:
        """Return why this version does not support the layout; "": it does."""
        try:
            self.run_file(candidate)
        except SettingsError as error:
            return str(error).removeprefix("run.toml: ")
        return ""


def text(plan: Plan) -> str:
    lines = [_head(plan.planner)]
    own, planned = plan.settings.trainer.micro_batch_tokens, plan.planner.own.trainer.micro_batch_tokens
    if planned > own:
        lines += [
            f"planned with trainer.micro_batch_tokens = {planned:,}, for the longest sample, which is not trained with {own:,}"
        ]
    settings = plan.settings
    given = [("rollout.engine", settings.rollout.engine, "transformers"), ("run.device", settings.run.device, "cpu")]
    given = given if settings.kind.generates else given[1:]
    if others := [f'{setting} = "{value}"' for setting, value, other in given if value == other]:
        lines += [
            f"planned for {'vLLM on GPUs' if settings.kind.generates else 'GPUs'}, whose memory and rates are others than with {' and '.join(others)}"
        ]
    if plan.planner.work.shape.weights < _LEAST_COMPARED:
        lines += [
            f"of a model below {_counted(_LEAST_COMPARED)} weights, the smallest compared with runs, seconds are lower bounds: what steps "
            "take at any size (Python, starts of kernels, messages) is not predicted; calibrate with a run (--calibrate)"
        ]
    for number, candidate in enumerate(plan.candidates[:SHOWN], 1):
        lines += ["", *_candidate(plan, number, candidate)]
    if not plan.candidates:
        lines += ["", "No layout fits."]
    if plan.problems:
        lines += ["", "Does not fit:", *(f"  {_refusal(problem)}" for problem in plan.problems[:_PROBLEMS])]
    if uncounted := plan.planner.work.uncounted:
        lines += ["", f"Not counted, neither memory nor time: {', '.join(uncounted)}, on a GPU."]
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    work, planner = plan.planner.work, plan.planner
    return {
        "model": work.shape.name,
        "weights": work.shape.weights,
        "cluster": planner.cluster.words,
        "limit_bytes": planner.limit_bytes,
        "layouts": [_entry(plan, candidate) for candidate in plan.candidates],
        "problems": [dataclasses.asdict(problem) for problem in plan.problems],
    }


def write(plan: Plan, given: Mapping[str, Any], file: Path) -> list[str]:
    """Write the run's TOML file of the ``given`` tables with the fastest layout that this version supports; return what is
    set by hand, where it is for several hosts.

    Raises:
        SettingsError: there is no such layout, or the file cannot be written.
    """
    candidate = next((each for each in plan.candidates if not plan.refusal(each)), None)
    if candidate is None and plan.candidates:
        plan.run_file(plan.candidates[0])  # says why
    if candidate is None:
        raise SettingsError("expected a layout that fits, found none: change --gpus")
    try:
        write_whole(file, plan.run_file(candidate, given))
    except OSError as error:
        raise SettingsError(f"expected a file to write to at {file}, found: {error}: change --write") from error
    return _by_hand(candidate.layout, plan.planner.cluster)


def _head(planner: Planner) -> str:
    work, cluster = planner.work, planner.cluster
    trained = f", of which LoRA trains {work.trained / 1e6:,.0f}M" if work.lora_rank else ""
    on_host = f", {cluster.host_memory_bytes / GIB:,.0f} GiB on a host" if cluster.host_memory_bytes else ""
    return (
        f"{work.shape.name} ({_counted(work.shape.weights)} weights{trained}) on {cluster.words}: {_batch(work)}\n"
        f"prompts of {work.prompt_tokens:,} tokens{'' if work.counts_prompts else ' (estimated)'}, completions of {work.lengths.mean:,.0f}, at most {work.lengths.most:,}"
        f"{_turns(work)}; "
        f"{planner.limit_bytes / GIB:.1f} GiB usable on a GPU{on_host}"
    )


def _batch(work: Workload) -> str:
    if work.kind.generates:
        return f"{work.groups} groups of {work.group_size} samples a step, max_lag {work.max_lag}"
    return f"{work.groups} {'preference pairs' if work.kind is RunKind.PAIRS else 'demonstrations'} a step"


def _turns(work: Workload) -> str:
    of = work.episode
    if of is None:
        return ""
    read = "found in the prefix cache" if of.has_cache else "read again with each turn"
    return f", in {of.turns:.1f} turns with {of.given_tokens:,.0f} given tokens and {of.wait_s:,.1f} s of tools, whose history is {read}"


def _candidate(plan: Plan, number: int, candidate: Candidate) -> list[str]:
    layout, work, refusal = candidate.layout, plan.planner.work, plan.refusal(candidate)
    step_s, trainer = candidate.pace.step_s, candidate.layout.trainer
    hours = work.steps * step_s * layout.gpus / 3600
    way = ("pulled from all ranks" if trainer.sharded else "pulled") if trainer.snapshots else "by file"
    transfer_s = candidate.rates.transfer_s
    live = [f"   weights, {way}: live after {_rounded(transfer_s)} s, {transfer_s / step_s:.0%} of a step"]
    copied_s, written_s = checkpoint_seconds(work, plan.planner.cluster, trainer)
    return [
        f"{number}. {layout.placement}{' (refused)' if refusal else _reservation(candidate)}: {layout.words}",
        *([f"   {refusal}"] if refusal else []),
        f"   {_rounded(step_s)} s a step, {work.samples / step_s:,.1f} samples/s, {_rounded(hours)} GPU-hours for {work.steps} steps"
        f"{_bound(candidate)}",
        *(live if layout.replicas else ()),
        f"   a checkpoint's copy takes {_rounded(_copy_bytes(plan, candidate) / GIB)} GiB of a host's memory and {_rounded(copied_s)} s, "
        f"in which training waits; written after {_rounded(written_s, 0)} s",
        *_on_host(plan, candidate),
        *_offloaded(plan, candidate),
        *_routes(plan, candidate),
        *(f"   {side}, {_phase(phase, table)}" for side, table in candidate.memory.items() for phase in table),
    ]


def _counted(weights: float) -> str:
    """Return a number of weights as it is named.

    >>> _counted(7_615_283_200), _counted(3_400_000)
    ('7.62B', '3.4M')
    """
    return f"{weights / 1e9:.2f}B" if weights >= 1e8 else f"{weights / 1e6:,.1f}M"


def _rounded(number: float, digits: int = 1) -> str:
    """Return a figure with its first digit if all of ``digits`` are 0.

    >>> _rounded(15.62), _rounded(0.0471), _rounded(0.00002)
    ('15.6', '0.05', '0')
    """
    if number >= 0.5 * 10.0**-digits:
        return f"{number:,.{digits}f}"
    return f"{number:.1g}" if number >= 1e-4 else "0"


def _copy_bytes(plan: Plan, candidate: Candidate) -> float:
    trainer = candidate.layout.trainer
    return checkpoint_copy_bytes(plan.planner.work, trainer, min(trainer.ranks, plan.planner.cluster.per_node))


def _on_host(plan: Plan, candidate: Candidate) -> list[str]:
    """Return what is said of states in a host's memory."""
    nbytes = _host_bytes(plan, candidate)
    return [f"   trainer.offload takes {nbytes / GIB:,.1f} GiB of a host's memory"] if nbytes else []


def _host_bytes(plan: Plan, candidate: Candidate) -> float:
    trainer = candidate.layout.trainer
    return offloaded_states_bytes(plan.planner.work, trainer, min(trainer.ranks, plan.planner.cluster.per_node))


def _offloaded(plan: Plan, candidate: Candidate) -> list[str]:
    """Return what is said of the inputs of layers in a host's memory."""
    trainer = candidate.layout.trainer
    of_rank, ranks = offloaded_bytes(plan.planner.work, trainer), min(trainer.ranks, plan.planner.cluster.per_node)
    if not of_rank:
        return []
    return [
        f"   inputs of layers take up to {ranks * of_rank / GIB:.1f} GiB of a host's memory, a rank {of_rank / GIB:.1f}"
    ]


def _routes(plan: Plan, candidate: Candidate) -> list[str]:
    work = plan.planner.work
    on_trainer, of_episodes = routes.host_bytes(work, candidate.layout.trainer.ranks), routes.episode_bytes(work)
    if not on_trainer:
        return []
    beside = f", {of_episodes / GIB:.1f} GiB of that of the services that play episodes" if of_episodes else ""
    return [f"   experts of tokens take up to {on_trainer / GIB:.1f} GiB of the memory of rank 0's host{beside}"]


def _reservation(candidate: Candidate) -> str:
    """Return what is said of a layout that was not run (docs/placement.md)."""
    layout = candidate.layout
    one_each = layout.tensor_parallel == 1 and (layout.engines == 1 or layout.placement == "at once")
    tried = layout.placement in ("separate", "alone") or (
        one_each and layout.trainer.ranks <= _TRIED_RANKS[layout.placement]
    )
    return "" if tried else " (not verified on GPUs)"


def _bound(candidate: Candidate) -> str:
    """Return what bounds the run, if something may."""
    waits, placement = candidate.pace.waits, candidate.layout.placement
    if placement == "alone":
        return ""
    if placement == "separate":
        return f"; generation bounds it: the trainer waits {waits:.0%}" if waits > _BOUND else "; training bounds it"
    where = "in turn" if placement == "shared" else "beside generation"
    return f"; the GPUs train {1 - waits:.0%} of the time, {where}"


def _phase(phase: Any, table: Table) -> str:
    parts = sorted(table[phase], key=lambda part: -part.nbytes)
    named = ", ".join(f"{part.name} {part.nbytes / GIB:.1f}" for part in parts if part.nbytes >= 0.05 * GIB)
    return f"{phase} {total(table[phase]) / GIB:.1f} GiB: {named}"


def _refusal(problem: MemoryShortage) -> str:
    part = problem.component
    return (
        f"{problem.layout}: {problem.needed_bytes / GIB:,.0f} of {problem.limit_bytes / GIB:,.0f} GiB, "
        f"{part.nbytes / GIB:,.0f} of them {part.name}: {part.advice}"
    )


def _entry(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    memory = {
        side: {phase: {part.name: part.nbytes for part in parts} for phase, parts in table.items()}
        for side, table in candidate.memory.items()
    }
    return {
        **dataclasses.asdict(candidate.layout),
        "words": candidate.layout.words,
        "supported": not plan.refusal(candidate),
        "gpus": candidate.layout.gpus,
        "samples_per_s": plan.planner.work.samples / candidate.pace.step_s,
        **dataclasses.asdict(candidate.pace),
        "memory_bytes": memory,
        "checkpoint_copy_bytes": _copy_bytes(plan, candidate),
        "offloaded_states_bytes": _host_bytes(plan, candidate),
        "offloaded_inputs_bytes": offloaded_bytes(plan.planner.work, candidate.layout.trainer),
        "routes_episodes_bytes": routes.episode_bytes(plan.planner.work),
        "routes_host_bytes": routes.host_bytes(plan.planner.work, candidate.layout.trainer.ranks),
        "checkpoint_s": checkpoint_seconds(plan.planner.work, plan.planner.cluster, candidate.layout.trainer),
        "peak_bytes": {side: peak(table) for side, table in candidate.memory.items()},
        "rates": dataclasses.asdict(candidate.rates),
    }


def _run_values(given: Mapping[str, Any], settings: Settings, candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """Return the ``given`` tables, in which what the layout decides is replaced."""
    values = copy.deepcopy(dict(given))
    layout, trainer = candidate.layout, candidate.layout.trainer
    table, rollout = values.setdefault("trainer", {}), values.setdefault("rollout", {})
    table |= {name: getattr(trainer, name) for name in ("zero_stage", "optimizer", "offload", "expert_parallel")}
    if trainer.micro_batch_tokens != settings.trainer.micro_batch_tokens:
        table["micro_batch_tokens"] = trainer.micro_batch_tokens
    table["ranks"] = min(trainer.ranks, cluster.per_node)
    in_turn = layout.placement == "shared"  # where weights are always replaced while generation is paused
    if layout.replicas:
        rollout |= {"replicas": layout.replicas, "max_groups": candidate.max_groups, "engines_per_gpu": layout.engines}
        vllm = rollout.setdefault("vllm", {})
        vllm["tensor_parallel_size"] = layout.tensor_parallel
        if candidate.utilization:
            vllm["gpu_memory_utilization"] = candidate.utilization
        weights = values.setdefault("weights", {})
        weights["transport"] = "pull" if trainer.snapshots else "file"
        weights.pop("snapshots", None)
        if trainer.snapshots and trainer.sharded:
            weights["snapshots"] = "sharded"
        weights["shadow"] = "auto" if layout.shadow or in_turn else "bucketed"
    for side in (table, rollout):
        for name in ("gpus", "nodes", "node", "rendezvous"):
            side.pop(name, None)
    placement = values.pop("placement", {})
    if not rollout:
        del values["rollout"]
    if not layout.replicas:
        if cluster.nodes == 1:
            table["gpus"] = list(range(layout.gpus))
    elif in_turn:
        values["placement"] = {**placement, "mode": "shared"}
    elif cluster.nodes == 1:
        table["gpus"], rollout["gpus"] = _gpus(layout)
    return values


def _hosts(layout: GpuLayout, cluster: Cluster) -> tuple[int, int]:
    """Return the hosts of the trainer, and of a replica."""
    return -(-layout.trainer.ranks // cluster.per_node), -(-layout.tensor_parallel // cluster.per_node)


def _on_hosts(values: Mapping[str, Any], layout: GpuLayout, cluster: Cluster) -> dict[str, Any]:
    """Return ``values`` as the first of several hosts gets them."""
    of = dict(zip(("trainer", "rollout"), _hosts(layout, cluster), strict=True))
    tables = {name: {**values[name], "nodes": nodes, "rendezvous": "host:1"} for name, nodes in of.items() if nodes > 1}
    if "rollout" in tables:
        tables["rollout"]["secret_file"] = "secret"  # noqa: S105 (a name, to check the rest)
    return {**values, **tables}


def _by_hand(layout: GpuLayout, cluster: Cluster) -> list[str]:
    """Return what a run on several hosts needs beside its file."""
    if cluster.nodes == 1:
        return []
    trainer, replica = _hosts(layout, cluster)
    values = f"trainer.nodes = {trainer}, trainer.gpu.count = {min(layout.trainer.ranks, cluster.per_node)}, rollout.replicas = {layout.replicas}, rollout.nodes = {replica}"
    each = min(layout.tensor_parallel, cluster.per_node)
    chart = f"On Kubernetes, values of the chart: {values}, rollout.gpu.count = {each}."
    lines = [
        f"For {cluster.nodes} hosts. {chart if layout.replicas else 'The Helm chart does not run it.'}",
        "Elsewhere, start each service on its host (docs/kubernetes.md)",
    ]
    if trainer > 1:
        lines[-1] += f"; the trainer with --trainer.nodes {trainer} --trainer.node N --trainer.rendezvous HOST:PORT"
    if replica > 1:
        lines[-1] += (
            f"; a replica with --rollout.nodes {replica} --rollout.node N --rollout.rendezvous HOST:PORT --rollout.secret_file FILE"
        )
    lines[-1] += "."
    return lines


def _gpus(layout: GpuLayout) -> tuple[list[int], list[int]]:
    every, ranks = list(range(layout.gpus)), layout.trainer.ranks
    return (every, every) if layout.placement == "at once" else (every[:ranks], every[ranks:])
