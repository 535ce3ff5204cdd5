"""What a run on GPUs needs, by the plan, and whether a machine has it: said before models are made and GPUs wait.

``certain`` is what ``penstock up`` refuses on such a machine, and a disk without room for the model. The rest is expected
(``over``), and a machine may show otherwise. Of checkpoints a run keeps as many as the disk holds (``lighter``): without
one, a resumed run replays its steps.
"""

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.services.cli.plan import layout_of, preferences
from penstock.services.cli.reports.memory import PhaseMemory, predicted
from penstock.services.plan.certain import check_gpus, check_host, check_processes, checkpoint_bytes, trainer_options
from penstock.services.plan.hardware import GIB, Cluster
from penstock.services.plan.layouts import USABLE, Planner
from penstock.services.plan.shortage import offloaded_states_bytes
from penstock.services.plan.workload import Lengths, Workload, workload_of
from penstock.shared.errors import SettingsError
from penstock.shared.model.context import check_context
from penstock.shared.process.memory_timeline import host_bytes
from penstock.shared.settings import Settings

_QUANTILES = 997
_ASIDE_BYTES = 8 * GIB
"""Of the disk, for records, shelves and what is compiled."""
_PHASES = ("wait", "forward and backward", "optimizer")
_BESIDE = 3 * GIB
"""Of a GPU, beside vLLM's share and the shadow: graphs, and what CUDA and NCCL take; also what a sleeping engine keeps."""
_SHARES = tuple(share / 100 for share in range(85, 25, -5))
_HOST_SHARE = 0.85
"""Of a host's memory, beside the processes of ranks and engines."""
_NEVER = 1_000_000
_GONE, _STATES = ("snapshots",), ("master weights", "moments")
"""Of the trainer, in turn: while it trains, and at rung 3 while it waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Where a run is."""

    cluster: Cluster
    """With the memory of its host."""
    disk_bytes: float
    """Free, where model and run are."""

    @classmethod
    def here(cls, cluster: Cluster, folder: Path) -> "Machine":
        """Return this one, with the GPUs of ``cluster``."""
        return cls(dataclasses.replace(cluster, host_memory_bytes=host_bytes()[0]), free_bytes(folder))


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """Of a run; bytes of the fullest GPU of a side."""

    step_s: float
    waits: float
    """Share of a step in which the trainer waits."""
    trainer_bytes: float
    engine_bytes: float
    """While it generates; in turn, with what the trainer keeps."""
    gpu_bytes: float
    """Usable."""
    offloaded_bytes: float
    host_bytes: float
    """The host's memory."""
    model_bytes: float
    checkpoint_bytes: float

    def over(self) -> list[str]:
        """Return what does not fit, as far as the plan knows."""
        sides = {
            "a trainer on a GPU": (self.trainer_bytes, self.gpu_bytes),
            "an engine on a GPU": (self.engine_bytes, self.gpu_bytes),
            "what is offloaded in the host's memory": (self.offloaded_bytes, _HOST_SHARE * self.host_bytes),
        }
        return [
            f"{side} needs {nbytes / GIB:.1f} of {room / GIB:.1f} GiB"
            for side, (nbytes, room) in sides.items()
            if nbytes > room
        ]

    def as_json(self) -> dict[str, float]:
        """Return seconds, and GiB."""
        words = dataclasses.asdict(self)
        return {
            name.replace("_bytes", "_gib"): round(value / (GIB if name.endswith("_bytes") else 1), 2)
            for name, value in words.items()
        }


def geometric(mean_tokens: float, most: int) -> Lengths:
    """Return lengths that end at each token with a probability of 1 / ``mean_tokens``, or at ``most``."""
    places = [(index + 0.5) / _QUANTILES for index in range(_QUANTILES)]
    ends = math.log1p(-1 / mean_tokens)
    sample = tuple(min(most, math.ceil(math.log1p(-place) / ends)) for place in places)
    return Lengths(sum(sample) / len(sample), most, sample=sample)


def needs(settings: Settings, machine: Machine, work: Workload, *, rung: int = 2) -> Needs:
    """Return what a run needs of ``machine``; ``rung``: of the ladder, if trainer and replicas take turns."""
    cluster, in_turn = machine.cluster, bool(settings.shared_devices)
    planner = Planner(work, cluster, preferences(settings))
    capacity, options = cluster.gpu.memory_bytes, trainer_options(settings)
    held = {phase: predicted(settings, _phase("trainer-0", phase, capacity)) for phase in _PHASES}
    gone = _GONE if in_turn and rung >= 2 else ()
    beside = _BESIDE if in_turn else 0.0
    trainer = max(_sum(held[phase], gone) for phase in _PHASES[in_turn:]) + beside
    engine = _sum(predicted(settings, _phase("rollout-0", "generate", capacity)), ("shadow",) if in_turn else ())
    waiting = _sum(held["wait"], _STATES if rung == 3 else ()) if in_turn else 0.0
    pace = planner.as_set(layout_of(settings, rung, mps=True)).pace
    return Needs(
        step_s=pace.step_s,
        waits=pace.waits,
        trainer_bytes=trainer,
        engine_bytes=engine + waiting,
        gpu_bytes=USABLE * capacity,
        offloaded_bytes=offloaded_states_bytes(work, options, options.ranks),
        host_bytes=cluster.host_memory_bytes,
        model_bytes=work.policy_bytes,
        checkpoint_bytes=checkpoint_bytes(settings),
    )


def _phase(replica: str, phase: str, capacity_bytes: float) -> PhaseMemory:
    return PhaseMemory(replica, "GPU", phase, capacity_bytes, 0.0, 0.0, {})


def _sum(parts: Mapping[str, float], without: Sequence[str] = ()) -> float:
    return sum(nbytes for name, nbytes in parts.items() if name not in without)


def certain(settings: Settings, machine: Machine, needed: Needs, *, made: bool) -> str:
    """Return why the run cannot be on ``machine``, or ""; ``made``: the model is on its disk already."""
    cluster = machine.cluster
    try:
        check_context(settings)
        check_processes(settings, cluster.per_node, cluster.host_memory_bytes)
        check_gpus(settings, [cluster.gpu.memory_bytes] * cluster.per_node)
        check_host(settings, cluster.per_node, cluster.host_memory_bytes)
    except SettingsError as error:
        return str(error)
    if not made and needed.model_bytes + _ASIDE_BYTES > machine.disk_bytes:
        return (
            f"expected room for a model of {needed.model_bytes / GIB:.1f} GiB, found {machine.disk_bytes / GIB:.1f} GiB free: change "
            "--folder or --models, or give fewer --layers"
        )
    return ""


def lighter(settings: Settings, machine: Machine, needed: Needs, *, made: bool) -> dict[str, object]:
    """Return the flags with which a run's checkpoints fit on the disk, beside its model.

    ``trainer.keep_last`` of them stay while the next one is written. One alone is never followed by another, and a run
    without any replays its steps.
    """
    room = machine.disk_bytes - _ASIDE_BYTES - (0.0 if made else needed.model_bytes)
    count = int(room // needed.checkpoint_bytes) if needed.checkpoint_bytes else _NEVER
    if count > settings.trainer.keep_last:
        return {}
    if count:
        return {"trainer.keep_last": max(1, count - 1)}
    return {"trainer.checkpoint_every_steps": _NEVER}


def engine_share(settings: Settings, machine: Machine) -> float:
    """Return the largest ``rollout.vllm.gpu_memory_utilization`` beside which a version has room on an engine's GPU."""
    capacity = machine.cluster.gpu.memory_bytes
    shadow = predicted(settings, _phase("rollout-0", "generate", capacity))["shadow"]
    room = USABLE * capacity - _BESIDE - shadow
    return next((share for share in _SHARES if share * capacity <= room), _SHARES[-1])


def workload(settings: Settings, prompt_tokens: int, lengths: Lengths) -> Workload:
    """Return the work of a run whose prompts and lengths are known."""
    return dataclasses.replace(workload_of(settings), prompt_tokens=prompt_tokens, lengths=lengths)


def free_bytes(folder: Path) -> float:
    """Return the free bytes of the disk of ``folder``, which need not exist."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return float(shutil.disk_usage(there).free)
