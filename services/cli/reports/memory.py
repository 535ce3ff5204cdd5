"""``penstock plan --memory``: what each process of a run held on its device, by phase and component, beside the plan."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.services.cli.connection import existing
from penstock.services.coordinator.records.jsonl import read
from penstock.services.coordinator.records.memory import MEMORY_FILE
from penstock.services.plan.certain import trainer_options
from penstock.services.plan.hardware import GIB
from penstock.services.plan.memory import Component, EngineOptions, engine_memory, trainer_table
from penstock.services.plan.workload import Workload, workload_of
from penstock.services.up.display import console
from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.settings import Settings, load_run
from penstock.shared.text.terminal import escaped_line

_FOLDED = dict.fromkeys(("logits", "reduction"), "activations")
"""Components that are compared as one."""
_UNCOMPARED = ("context", "other")
"""What torch does not allocate, and what has no name."""


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseMemory:
    """A phase of one process on one device."""

    replica: str
    device: str
    phase: str
    capacity_bytes: float
    latest_bytes: float
    peak_bytes: float
    components: Mapping[str, float]
    """At the peak."""


def phases(lines: Iterable[Mapping[str, Any]]) -> list[PhaseMemory]:
    """Return every phase in ``lines`` of memory.jsonl, oldest first, by process and device."""
    latest: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    largest: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for line in lines:
        for sample in line.get("samples", ()):
            key = (line["replica"], sample["device"], sample["phase"])
            latest[key] = sample
            if key not in largest or sample["total_bytes"] > largest[key]["total_bytes"]:
                largest[key] = sample
    return [
        PhaseMemory(*key, top["capacity_bytes"], latest[key]["total_bytes"], top["total_bytes"], top["components"])
        for key, top in sorted(largest.items(), key=lambda item: item[0][:2])
    ]


def predicted(settings: Settings, measured: PhaseMemory) -> dict[str, float]:
    """Return the plan's components of a measured phase; empty if it plans none."""
    work = workload_of(settings)
    if measured.replica.startswith("rollout") and measured.phase == "generate":
        on_cpu = measured.device.endswith(" cpu")
        fills = settings.rollout.engine == "vllm" or (settings.rollout.engine == "auto" and not on_cpu)
        return _folded(_engine(settings, work, measured.capacity_bytes, fills=fills))
    if not measured.replica.startswith("trainer"):
        return {}
    if measured.device.endswith(" cpu"):
        work = dataclasses.replace(work, weight_bytes=4)  # the trainer computes in float32 there
    options, room_bytes = trainer_options(settings), measured.capacity_bytes
    if settings.common_gpus:  # the engines have theirs at the same time
        room_bytes *= 1 - settings.rollout.vllm.gpu_memory_utilization
    if "." in measured.replica and not options.sharded:  # rank 0 alone has snapshots
        options = dataclasses.replace(options, snapshots=0)
    table, _ = trainer_table(work, options, room_bytes)
    return _folded({str(phase): parts for phase, parts in table.items()}.get(measured.phase, ()))


def _engine(settings: Settings, work: Workload, capacity_bytes: float, *, fills: bool) -> Sequence[Component]:
    """``fills``: whether it is vLLM, which takes all that it may for its cache, whether it needs it or not."""
    rollout = settings.rollout
    engines = rollout.engines_per_gpu if isinstance(rollout.engines_per_gpu, int) else 1
    options = EngineOptions(
        rollout.vllm.tensor_parallel_size,
        engines,
        rollout.vllm.gpu_memory_utilization,
        rollout.max_groups * settings.sampling.group_size,
    )
    *fixed, shadow, experts, cache = engine_memory(work, options, capacity_bytes, capacity_bytes).components
    if not fills:
        return [*fixed, shadow, experts, cache]
    filled = max(cache.nbytes, options.utilization * capacity_bytes - sum(part.nbytes for part in fixed))
    return [*fixed, shadow, experts, dataclasses.replace(cache, nbytes=filled)]


def _folded(parts: Iterable[Component]) -> dict[str, float]:
    return _summed((part.name, part.nbytes) for part in parts)


def _summed(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part, nbytes in parts:
        name = _FOLDED.get(part, part)
        sums[name] = sums.get(name, 0.0) + nbytes
    return sums


def show(run: Path, unused: object = None, *, as_json: bool) -> None:
    """Print the memory of the run in folder ``run``, and what is planned for it. Raises PenstockError: it has no records,
    or ``unused`` options were given.
    """
    if unused:
        raise SettingsError("--memory shows a run as it was: leave out CONFIG and all options but --json")
    measured = phases(read(existing(run) / MEMORY_FILE))
    if not measured:
        raise PenstockError(
            f"no records of memory in {run / MEMORY_FILE}: they are written from a run's first step on; "
            "give the folder of another run"
        )
    settings = load_run(run)
    if as_json:
        console.say_json([dataclasses.asdict(phase) | {"predicted": predicted(settings, phase)} for phase in measured])
        return
    for place in dict.fromkeys((phase.replica, phase.device) for phase in measured):
        own = [phase for phase in measured if (phase.replica, phase.device) == place]
        console.say(f"{escaped_line(' on '.join(place))}: {own[0].capacity_bytes / GIB:.1f} GiB")
        console.show(_phases(own))
        if any(predicted(settings, phase) for phase in own):
            console.show(_compared(own, settings))
        console.say("")


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left")
    return table


def _phases(own: Sequence[PhaseMemory]) -> Table:
    table = _table("GiB", "latest", "peak")
    table.add_column("at the peak")
    for phase in own:
        largest = sorted(phase.components.items(), key=lambda part: -part[1])
        parts = escaped_line(", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in largest))
        table.add_row(Text(escaped_line(phase.phase)), _gib(phase.latest_bytes), _gib(phase.peak_bytes), Text(parts))
    return table


def _compared(own: Sequence[PhaseMemory], settings: Settings) -> Table:
    table = _table("GiB", "predicted", "measured", "difference")
    for phase in own:
        expected = predicted(settings, phase)
        if not expected:
            continue
        actual = _summed(phase.components.items())
        known = actual if phase.device.endswith(" cpu") else [*expected, *actual]
        names = [name for name in dict.fromkeys(known) if name not in _UNCOMPARED]
        both = [(expected.get(name, 0.0), actual.get(name, 0.0)) for name in names]
        table.add_row(Text(escaped_line(phase.phase), "bold"), *_difference(*map(sum, zip(*both, strict=True))))
        for name, pair in zip(names, both, strict=True):
            if max(pair) > 0:
                table.add_row(f"  {escaped_line(name)}", *_difference(*pair))
    return table


def _difference(expected: float, seen: float) -> tuple[str, str, str]:
    return _gib(expected), _gib(seen), f"{expected / seen - 1:+.0%}" if seen else "–"


def _gib(nbytes: float | None) -> str:
    return "–" if nbytes is None else f"{nbytes / GIB:.3g}"
