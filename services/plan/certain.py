"""What cannot fit on the GPUs of this machine or into its memory, for certain; ``penstock up`` refuses it before the
start.

Only what is allocated whatever the batch counts: weights, states and snapshots of the trainer, weights of an engine; where
several processes are on one GPU at the same time, also the least key-value cache that vLLM takes. Activations, contexts and
fragmentation are not counted, and neither are models whose sizes config.json does not give exactly, so that nothing that
fits is refused.
"""

import dataclasses
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence

from penstock.services.plan.hardware import GIB
from penstock.services.plan.memory import (
    ASIDE,
    LEAST_CACHE,
    LOGIT_COPIES,
    WEIGHT_COPIES,
    Component,
    TrainerOptions,
    offloaded_bytes,
    total,
    trainer_table,
)
from penstock.services.plan.workload import Workload, snapshots_of, workload_of
from penstock.shared.errors import SettingsError
from penstock.shared.model.context import read_config
from penstock.shared.process.gpus import visible_names
from penstock.shared.settings import Settings
from penstock.shared.settings.trainer import bucket_as_set

_MARGIN = 1.02
_QUERY = ("--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits")
_EXACT = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Models whose weights config.json gives exactly, but for norms and biases."""
_MEMORY_ARGUMENTS = frozenset({"kv_cache_memory_bytes", "num_gpu_blocks_override", "max_num_batched_tokens"})
"""Of vLLM, with which its cache, or what it sets aside for activations, is another."""
_PROCESS_BYTES = 128 * 2.0**20
"""That a process has at least for itself once it has imported torch."""
_COUNTED = ("weights", "master weights", "moments", "critic", "reference", "snapshots")


def trainer_options(settings: Settings) -> TrainerOptions:
    """Return what of a run's settings decides its trainer's memory."""
    trainer = settings.trainer
    return TrainerOptions(
        ranks=trainer.ranks * trainer.nodes,
        zero_stage=trainer.zero_stage,
        optimizer=trainer.optimizer,
        offload=trainer.offload,
        micro_batch_tokens=trainer.micro_batch_tokens,
        checkpointing=trainer.gradient_checkpointing,
        chunk_tokens=settings.internal.logits_chunk_tokens,
        snapshots=snapshots_of(settings),
        sharded=settings.weights.snapshots == "sharded",
        sequence_parallel=trainer.sequence_parallel,
        expert_parallel=trainer.expert_parallel,
        bucket=bucket_as_set(trainer.deepspeed),
    )


def visible_gpus() -> list[float]:
    """In bytes, by nvidia-smi, of those in CUDA_VISIBLE_DEVICES if that is set; empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        asked = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=10, check=False)
        rows = [line.partition(",") for line in asked.stdout.split("\n") if line.strip() and not asked.returncode]
        sizes = [(uuid.strip(), float(mebibytes) * (1 << 20)) for uuid, _, mebibytes in rows]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    chosen = visible_names(os.environ)
    if chosen is None:
        return [nbytes for _, nbytes in sizes]
    by_name = dict(sizes) | {str(index): nbytes for index, (_, nbytes) in enumerate(sizes)}
    return [by_name[name] for name in chosen if name in by_name]


def check_gpus(settings: Settings, memory_bytes: Sequence[float]) -> None:
    """Raise SettingsError if trainer or engine, or all that name a GPU together, cannot fit on the largest of the GPUs."""
    if not memory_bytes or settings.run.device == "cpu" or settings.rollout.engine == "scripted":
        return
    models = [settings.policy.model, *filter(None, [settings.algorithm.critic.model])]
    is_exact = all(read_config(model).get("model_type") in _EXACT for model in models)
    if not is_exact:
        return
    work = workload_of(settings)
    _refuse("the trainer", _trainer(settings, work), max(memory_bytes))
    if not settings.kind.generates:
        return
    _refuse("an engine", _engine(settings, work), max(memory_bytes))
    if settings.placement.mode == "separate":
        _check_together(settings, work, memory_bytes)


def check_host(settings: Settings, gpus: int, memory_bytes: float) -> None:
    """Raise SettingsError if what the trainer moves to the host's memory cannot fit there."""
    trainer, placement = settings.trainer, settings.placement
    rung = placement.rung if settings.shared_devices and isinstance(placement.rung, int) else 0
    optimizer, weights = trainer.offload != "none" or rung >= 3, trainer.offload == "all" or rung >= 4
    if not gpus or settings.run.device == "cpu" or not optimizer:
        return
    if read_config(settings.policy.model).get("model_type") not in _EXACT:
        return
    moved = {"master weights", "moments", *(["weights"] if weights else [])}
    parts = [part for part in _trainer(settings, workload_of(settings), offload="none") if part.name in moved]
    if trainer.offload != "none":  # DeepSpeed's: float32 gradients, and a buffer in the weights' type
        buffers = sum(1.5 * part.nbytes for part in parts if part.name == "master weights")
        parts.append(Component("gradients", buffers))
    needed_bytes = trainer.ranks * total(parts)
    if needed_bytes <= memory_bytes:
        return
    setting = f'trainer.offload = "{trainer.offload}"' if trainer.offload != "none" else f"placement.rung = {rung}"
    raise SettingsError(
        f"expected {' and '.join(part.name for part in parts)} of the trainer to fit into this machine's memory with {setting}, "
        f"which moves them there, found {memory_bytes / GIB:.1f} GiB, and they need {needed_bytes / GIB:.1f}: "
        f"{'change it' if trainer.offload != 'none' else 'lower it'}, or use a machine with more memory "
        "(`penstock plan` compares layouts)"
    )


def check_processes(settings: Settings, gpus: int, memory_bytes: float) -> None:
    """Raise SettingsError if this machine's memory cannot hold as many ranks and replicas, whatever the model."""
    vllm, on_cpu = settings.rollout.vllm, settings.run.device == "cpu" or not gpus
    is_sized = "kv_cache_memory_bytes" in vllm.arguments or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    shares = settings.rollout.replicas * vllm.gpu_memory_utilization
    if on_cpu and settings.rollout.engine == "vllm" and settings.kind.generates and shares > 1 and not is_sized:
        raise SettingsError(
            f"expected rollout.replicas × rollout.vllm.gpu_memory_utilization below 1 for vLLM on a CPU, where each replica takes that "
            f"share of the machine's memory for its key-value cache, found {shares:g}: lower one of them, or set kv_cache_memory_bytes "
            "in rollout.vllm.arguments"
        )
    ranks, replicas = settings.trainer.ranks, settings.rollout.replicas if settings.kind.generates else 0
    if (needed_bytes := (ranks + replicas) * _PROCESS_BYTES) > memory_bytes:
        raise SettingsError(
            f"expected trainer.ranks and rollout.replicas whose processes fit into this machine's memory of {memory_bytes / GIB:.1f} GiB, "
            f"found {ranks} and {replicas}, which need at least {needed_bytes / GIB:.1f}: lower them"
        )


def inputs_notice(settings: Settings, gpus: Sequence[float], memory_bytes: float) -> str:
    """Return the notice that this machine's memory cannot hold the inputs of layers in passes of the longest rows, or ""."""
    trainer = settings.trainer
    if not gpus or settings.run.device == "cpu" or read_config(settings.policy.model).get("model_type") not in _EXACT:
        return ""
    options = dataclasses.replace(trainer_options(settings), gpu_bytes=max(gpus))
    needed_bytes = trainer.ranks * offloaded_bytes(workload_of(settings), options)
    if needed_bytes <= memory_bytes:
        return ""
    return (
        f"passes of trainer.micro_batch_tokens = {trainer.micro_batch_tokens:,} would keep {needed_bytes / GIB:.1f} GiB of inputs of layers in "
        f"this machine's memory, which has {memory_bytes / GIB:.1f} GiB: the rest stays on the GPUs"
    )


def checkpoint_bytes(settings: Settings) -> float:
    """Return the least that a checkpoint takes on the disk of this machine's ranks, 0 if its size is not known exactly."""
    trainer, policy = settings.trainer, settings.policy
    exact = read_config(policy.model).get("model_type") in _EXACT
    if settings.run.device == "cpu" or policy.lora.rank or not exact:
        return 0.0
    work = workload_of(settings)
    parts = {part.name: part.nbytes for part in _trainer(settings, work, offload="none")}
    weights = 0.0 if trainer.zero_stage == 3 else work.policy_bytes  # at stage 3 the master weights alone
    states = parts["master weights"] + parts["moments"]
    return weights + states * (trainer.ranks if trainer.zero_stage else 1)


def _check_together(settings: Settings, work: Workload, memory_bytes: Sequence[float]) -> None:
    ranks, replicas = _named(settings, len(memory_bytes))
    of_replica = _replica(settings, work, max(memory_bytes))
    for gpu in sorted({*ranks, *(name for names in replicas for name in names)}):
        beside = sum(gpu in names for names in replicas)
        parts = [Component(part.name, beside * part.nbytes, part.advice) for part in of_replica]
        if gpu in ranks and beside:
            _refuse(
                f"the trainer and {_counted(beside, 'replica')}, which work at the same time,",
                [*_trainer(settings, work, ranks.index(gpu)), *parts],
                max(memory_bytes),
                ', or give rollout.gpus other GPUs, or set placement.mode = "shared", with which they take turns',
            )
        elif beside > 1:
            _refuse(f"{beside} replicas", parts, max(memory_bytes), ", or give rollout.gpus more GPUs")


def are_together(settings: Settings, gpus: int) -> bool:
    """Return whether trainer and replicas use a GPU of this machine's ``gpus`` at the same time."""
    if settings.placement.mode != "separate" or not settings.kind.generates or settings.rollout.engine == "scripted":
        return False
    ranks, replicas = _named(settings, gpus)
    return any(gpu in ranks for names in replicas for gpu in names)


def _counted(number: int, word: str) -> str:
    return f"a {word}" if number == 1 else f"{number} {word}s"


def _named(settings: Settings, gpus: int) -> tuple[Sequence[int], list[Sequence[int]]]:
    """Return the GPU of each rank and the GPUs of each replica, as trainer.gpus and rollout.gpus name them. Where they do
    not, each process sees all GPUs and takes the first ones; which these are beside named ones, is known of one GPU only.
    """
    trainer, rollout = settings.trainer, settings.rollout
    if bool(trainer.gpus) != bool(rollout.gpus) and gpus > 1:
        return (), []
    each, used = len(rollout.gpus) // rollout.replicas, rollout.vllm.tensor_parallel_size
    replicas: list[Sequence[int]] = [
        rollout.gpus[place * each : (place + 1) * each][:used] or range(used) for place in range(rollout.replicas)
    ]
    return trainer.gpus or range(trainer.ranks), replicas


def _trainer(settings: Settings, work: Workload, rank: int = 0, *, offload: str = "") -> list[Component]:
    options = dataclasses.replace(trainer_options(settings), offload=offload or settings.trainer.offload)
    table, _ = trainer_table(work, options, 0.0)
    own = _COUNTED if not rank or options.sharded else _COUNTED[:-1]  # rank 0 alone has whole snapshots
    return [part for part in table["wait"] if part.name in own]


def _engine(settings: Settings, work: Workload) -> list[Component]:
    parallel = settings.rollout.vllm.tensor_parallel_size
    advice = "raise rollout.vllm.tensor_parallel_size"
    return [Component("weights", work.policy_bytes / parallel, advice)]


def _replica(settings: Settings, work: Workload, memory_bytes: float) -> list[Component]:
    """Return the least that a replica's engines take of each of its GPUs, its key-value cache included."""
    vllm, count = settings.rollout.vllm, settings.rollout.engines_per_gpu
    weights = work.policy_bytes / vllm.tensor_parallel_size
    if vllm.quantization != "none":
        return []
    if count != "auto" and count > 1:
        fewer = "lower rollout.engines_per_gpu"
        apart = not work.lora_rank and settings.weights.transport != "file" and settings.weights.shadow != "bucketed"
        shadows = count * weights if apart else 0.0
        return [
            Component("the engines' weights", count * weights, fewer),
            Component("second copies of these", shadows, fewer),
            Component("their key-value caches", count * LEAST_CACHE, fewer),
        ]
    cache = _cache(settings, work, memory_bytes) if count == 1 and _is_vllm(settings) else 0.0
    return [
        Component("the engine's weights", weights, "raise rollout.vllm.tensor_parallel_size"),
        Component("its key-value cache", cache, "lower rollout.vllm.gpu_memory_utilization"),
    ]


def _cache(settings: Settings, work: Workload, memory_bytes: float) -> float:
    """Return the least cache of one vLLM engine, which fills its share of the GPU with it."""
    vllm, arguments = settings.rollout.vllm, settings.rollout.vllm.arguments
    if not _MEMORY_ARGUMENTS.isdisjoint(arguments):
        return 0.0
    own, most = arguments.get("max_num_seqs"), settings.rollout.max_groups * settings.sampling.group_size
    logits = (own if isinstance(own, int) else most) * work.shape.vocabulary * 4 * LOGIT_COPIES
    weights = work.policy_bytes / vllm.tensor_parallel_size
    return max(0.0, vllm.gpu_memory_utilization * memory_bytes - WEIGHT_COPIES * weights - ASIDE - logits)


def _is_vllm(settings: Settings) -> bool:
    engine = settings.rollout.engine
    return engine == "vllm" or (engine == "auto" and importlib.util.find_spec("vllm") is not None)


def _refuse(side: str, parts: Sequence[Component], memory_bytes: float, otherwise: str = "") -> None:
    if total(parts) <= _MARGIN * memory_bytes:
        return
    largest = max(parts, key=lambda part: part.nbytes)
    raise SettingsError(
        f"expected {side} to fit on a GPU of {memory_bytes / GIB:.1f} GiB, and {'they need' if otherwise else 'it needs'} at least "
        f"{total(parts) / GIB:.1f} GiB, {largest.nbytes / GIB:.1f} of them for {largest.name}: {largest.advice}{otherwise} "
        "(`penstock plan` compares layouts)"
    )
