"""What cannot fit on the GPUs of this machine, for certain; ``penstock up`` refuses it before the start.

Only what is allocated whatever the batch counts: weights, states and snapshots of the trainer, weights of an engine.
Activations, caches, contexts and fragmentation are not counted, and neither are models whose sizes config.json does not give
exactly, so that nothing that fits is refused.
"""

import shutil
import subprocess
from collections.abc import Sequence

from services.plan.hardware import GIB
from services.plan.memory import Component, TrainerOptions, total, trainer_table
from services.plan.workload import Workload, snapshots_of, workload_of
from shared.errors import SettingsError
from shared.model.context import read_config
from shared.settings import Settings

_MARGIN = 1.02
_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
_EXACT = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Models whose weights config.json gives exactly, but for norms and biases."""
_COUNTED = ("weights", "master weights", "moments", "critic", "reference", "snapshots")


def visible_gpus() -> list[float]:
    """In bytes, by nvidia-smi; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        asked = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=10, check=False)
        return (
            [float(line) * (1 << 20) for line in asked.stdout.split("\n") if line.strip()]
            if not asked.returncode
            else []
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []


def check_gpus(settings: Settings, memory_bytes: Sequence[float]) -> None:
    """Raise SettingsError if trainer or engine cannot fit on the largest of the GPUs."""
    if not memory_bytes or settings.run.device == "cpu" or settings.rollout.engine == "scripted":
        return
    models = [settings.policy.model, *filter(None, [settings.algorithm.critic.model])]
    if any(read_config(model).get("model_type") not in _EXACT for model in models):
        return
    work = workload_of(settings)
    _refuse("the trainer", _trainer(settings, work), max(memory_bytes))
    if not settings.algorithm.is_supervised:
        _refuse("an engine", _engine(settings, work), max(memory_bytes))


def _trainer(settings: Settings, work: Workload) -> list[Component]:
    trainer = settings.trainer
    options = TrainerOptions(
        ranks=trainer.ranks * trainer.nodes,
        zero_stage=trainer.zero_stage,
        optimizer=trainer.optimizer,
        offload=trainer.offload,
        snapshots=snapshots_of(settings),
        sharded=settings.weights.snapshots == "sharded",
    )
    table, _ = trainer_table(work, options, 0.0)
    return [part for part in table["wait"] if part.name in _COUNTED]


def _engine(settings: Settings, work: Workload) -> list[Component]:
    parallel = settings.rollout.vllm.tensor_parallel_size
    advice = "raise rollout.vllm.tensor_parallel_size"
    return [Component("weights", work.policy_bytes / parallel, advice)]


def _refuse(side: str, parts: Sequence[Component], memory_bytes: float) -> None:
    if total(parts) <= _MARGIN * memory_bytes:
        return
    largest = max(parts, key=lambda part: part.nbytes)
    raise SettingsError(
        f"expected {side} to fit on a GPU of {memory_bytes / GIB:.1f} GiB, and it needs at least {total(parts) / GIB:.1f} GiB, "
        f"{largest.nbytes / GIB:.1f} of them for {largest.name}: {largest.advice} (`penstock plan` compares layouts)"
    )
