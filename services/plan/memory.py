"""Memory of one GPU in closed form, by phase and component.

A trainer's rank, ``P`` weights over ``N`` ranks, bytes per weight (bfloat16, AdamW)::

    weights 2 · gradients 2 · master weights 4 · moments 8 (8-bit: 2)      over N from ZeRO stage 3 · 2 · 1 · 1
    reduction      DeepSpeed's bucket; a rank's reduced gradients at stage 2; gathered weights at stage 3
                   of experts, ``trainer.expert_parallel`` ranks have a part each, before ZeRO divides
    stored         a layer's input for every layer, and all that it keeps for those that are not recomputed; of inputs that
                   the host's memory holds (rows whose inputs take a large share of the GPU), two
    activations    stored, and the larger of: the logits with the gradient of the output layer; one layer's backward pass
    snapshots      two copies (``weights.transport = "pull"``), whole on rank 0, or in shares on all ranks

An engine's GPU, over ``T`` tensor parallel ranks: weights and shadow 2 P / T each, activations, logits, and the
key-value cache in what is left. ``routes`` has the experts of tokens.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from penstock.services.plan import routes
from penstock.services.plan.hardware import GIB
from penstock.services.plan.shapes import Shape
from penstock.services.plan.workload import Workload
from penstock.shared.settings.trainer import reduced_together
from penstock.shared.weights.format import BUCKET_BYTES

Phase = Literal["wait", "forward and backward", "optimizer", "critic", "generate"]
CONTEXT = 0.6 * GIB
"""CUDA, cuBLAS and the program."""
_NCCL = 1.0 * GIB
_GATHERED = 2e9
"""Weights that live at a time at ZeRO stage 3."""
_RESERVE = 1.1
"""By which the trainer overestimates what it keeps (services/trainer/model/memory/recomputation.py)."""
_SUB_GROUP = 4e9
"""Gradients in float32 of DeepSpeed's 1 billion weights that stage 3 steps at a time."""
_LARGE, _GROUP = 2**31 - 2**20, 2**30
"""Weights of a model that the optimizer updates by groups, and of a group (services/trainer/model/optimizer.py)."""
_LOGIT_BYTES = 4.3
"""Of one logit with its gradient, by the fused kernel (1.33 GB for 2,048 tokens of 152,064 words)."""
_LOGIT_GRADIENT = 2.0
"""Of a chunk's logit while all logits are kept."""
LOGIT_COPIES = 6
"""Float32 copies of a decoding step's logits."""
_GRAPHS = 1.5 * GIB
"""CUDA graphs and activations of an engine."""
ASIDE, WEIGHT_COPIES, LEAST_CACHE, _SHADOW_COPIES = 4.0 * GIB, 1.25, 1.0 * GIB, 1.05
"""What each of several engines on a GPU sets aside (services/rollout/engines/vllm/several/plan.py)."""
OFFLOADED, AHEAD = 0.05, 2
"""Share of a GPU above which the host holds the inputs of layers that are computed again, and how many of them are on the GPU
meanwhile (services/trainer/model/memory/offloading.py)."""
USED = 0.85
"""Share of the memory that activations may fill (services/trainer/model/memory/recomputation.py)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Component:
    """Bytes on one GPU, and the setting that reduces them."""

    name: str
    nbytes: float
    advice: str = ""


Components = Sequence[Component]
Table = Mapping[Phase, Components]


def total(components: Components) -> float:
    return sum(component.nbytes for component in components)


def peak(table: Table) -> float:
    return max(map(total, table.values()), default=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerOptions:
    """What of the trainer's settings decides its memory."""

    ranks: int
    zero_stage: int
    optimizer: str = "adamw"
    offload: str = "none"
    micro_batch_tokens: int = 16_384
    checkpointing: bool | Literal["auto"] = "auto"
    chunk_tokens: int = 2048
    snapshots: int = 2
    """Copies of the policy that are served; 0: weights travel by file."""
    sharded: bool = False
    """Whether each rank has a share of them, rather than rank 0 all."""
    gpu_bytes: float = math.inf
    """Of its GPU; the host holds the inputs of layers that would take a large share of it."""
    sequence_parallel: int = 1
    """Ranks that compute a long sample together; each computes no more tokens than without."""
    expert_parallel: int = 1
    """Ranks that share one copy of the experts."""
    bucket: int = 0
    """Gradients of DeepSpeed's bucket, which is freed after the last pass, as set; 0: the trainer's choice."""

    def shards(self, from_stage: int) -> int:
        """Return over how many ranks something is cut that ZeRO shards from ``from_stage`` on."""
        return self.ranks if self.zero_stage >= from_stage else 1

    def held(self, weights: int, experts: int, from_stage: int) -> float:
        """Return how many of ``weights``, of which ``experts`` are shared, a rank has if ZeRO shards from ``from_stage``."""
        if self.zero_stage >= from_stage:
            return weights / self.ranks
        return weights - experts * (1 - 1 / self.expert_parallel)


def trainer_table(work: Workload, options: TrainerOptions, limit_bytes: float) -> tuple[Table, int]:
    """Return rank 0's memory by phase, and the layers that keep their activations within ``limit_bytes``."""
    lasting = _lasting(work, options)
    moving = _gradients(work, options)
    experts = Component("experts of tokens", routes.pass_bytes(work, options.micro_batch_tokens))
    base = total([*lasting, *moving, experts])
    kept, keeps_logits = _kept(work, options, USED * limit_bytes - base)
    passes = [*moving, experts, *activations(work, options, kept, keeps_logits=keeps_logits)]
    held = _held(work, options)
    table: dict[Phase, Components] = {
        "wait": [*lasting, *held],
        "forward and backward": [*lasting, *max(passes, _reduced(work, options), key=total)],
        "optimizer": [*lasting, *_step(work, options)],
    }
    if work.critic is not None:
        of_critic = _of_critic(work, work.critic)
        passes = [*_gradients(of_critic, options), *activations(work, options, kept)[:1]]
        busy = max(passes, _step(of_critic, options), key=total)
        table["critic"] = [*lasting, *held, *_without(busy, _held(of_critic, options))]
    return table, kept


_MORE_RANKS = "raise trainer.ranks"
_SNAPSHOTS = 'set weights.transport = "file", or weights.snapshots = "sharded" on several ranks'
_STATES = 'raise trainer.ranks or trainer.zero_stage, or set trainer.offload = "optimizer"'


def _lasting(work: Workload, options: TrainerOptions) -> list[Component]:
    weights = options.held(work.shape.weights, work.shape.expert_weights, 3) * work.weight_bytes
    weights += work.trained * work.weight_bytes / options.shards(3) if work.lora_rank else 0.0
    away = 'set trainer.zero_stage = 3, or trainer.offload = "all" with it'
    parts = [Component("weights", 0.0 if options.offload == "all" else weights, away)]
    parts += optimizer_states(work.trained, work, options)
    if work.critic is not None:
        parts.append(Component("critic", _critic_bytes(_of_critic(work, work.critic), options), _STATES))
    if work.reference:
        less = "set policy.lora.rank" + ', or algorithm.reference = "reward"' * work.kind.generates
        parts.append(Component("reference", float(work.policy_bytes), less))  # whole, whatever DeepSpeed does
    if options.snapshots and not work.lora_rank:
        parts.append(Component("snapshots", options.snapshots * _snapshot(work, options), _SNAPSHOTS))
    return [*parts, Component("context", CONTEXT + (_NCCL if options.ranks > 1 else 0.0))]


def _snapshot(work: Workload, options: TrainerOptions) -> float:
    """Return rank 0's bytes of a snapshot; of a sharded one, the first bucket, which is the embeddings', and its share."""
    if not options.sharded:
        return float(work.policy_bytes)
    first = work.shape.vocabulary * work.shape.hidden * work.weight_bytes
    return first + (work.policy_bytes - first) / options.ranks


def optimizer_states(trained: int, work: Workload, options: TrainerOptions) -> list[Component]:
    if options.offload != "none":
        return []
    shards = options.shards(1)
    moments = 2 if options.optimizer == "adamw_8bit" else 8
    master = 0 if work.weight_bytes == 4 and not options.zero_stage else 4
    advice = f'{_STATES}, or trainer.optimizer = "adamw_8bit"'
    return [
        Component("master weights", trained * master / shards, _STATES),
        Component("moments", trained * moments / shards, advice),
    ]


def _critic_bytes(work: Workload, options: TrainerOptions) -> float:
    weights = options.held(work.trained, work.shape.expert_weights, 3) * work.weight_bytes
    return weights + total([*optimizer_states(work.trained, work, options), *_held(work, options)])


def _of_critic(work: Workload, critic: Shape) -> Workload:
    """Return ``work`` with the critic in the policy's place; all of its weights are trained."""
    return dataclasses.replace(work, shape=critic, lora_rank=0)


def _gradients(work: Workload, options: TrainerOptions) -> list[Component]:
    held = options.held(work.trained, work.trained_experts, 2) * work.weight_bytes
    parts = [Component("gradients", held, "set trainer.zero_stage = 2")]
    if not options.zero_stage:
        return parts
    buffers = _bucket(work, options)
    if options.zero_stage == 3:
        buffers += min(_GATHERED, work.policy_bytes)
    elif options.zero_stage == 2 and options.offload == "none":
        buffers += work.trained * work.weight_bytes / options.ranks  # of this pass, added to those of the passes before
    return [*parts, Component("reduction", buffers, "set zero_optimization in trainer.deepspeed")]


def _held(work: Workload, options: TrainerOptions) -> list[Component]:
    """Return what stage 3 keeps between steps: a rank's gradients and the bucket in which they are reduced."""
    if options.zero_stage < 3 or options.offload != "none":
        return []
    gradients, reduction = _gradients(work, options)
    return [gradients, dataclasses.replace(reduction, nbytes=_bucket(work, options))]


def _bucket(work: Workload, options: TrainerOptions) -> float:
    gradients = options.held(work.trained, work.trained_experts, 4)
    return reduced_together(round(gradients), options.bucket) * work.weight_bytes


def _without(parts: Components, counted: Components) -> list[Component]:
    """Return ``parts`` without the bytes that are counted elsewhere."""
    sizes = {part.name: part.nbytes for part in counted}
    return [dataclasses.replace(part, nbytes=max(0.0, part.nbytes - sizes.get(part.name, 0.0))) for part in parts]


def _reduced(work: Workload, options: TrainerOptions) -> list[Component]:
    """Return what the end of the last backward pass needs at stage 1: all gradients, and on several ranks a flat copy of
    the rank's share."""
    gradients = _gradients(work, options)[0]
    copied = options.zero_stage == 1 and options.ranks > 1 and options.offload == "none"
    copies = work.trained * work.weight_bytes / options.ranks if copied else 0.0
    return [gradients, Component("reduction", copies, "set zero_optimization in trainer.deepspeed")]


def _step(work: Workload, options: TrainerOptions) -> list[Component]:
    """Return what the optimizer's step needs: gradients, and below stage 3 a flat copy of a rank's share of a group,
    which becomes one in float32; the bucket is freed."""
    gradients, *reduction = _gradients(work, options)
    if not options.zero_stage:
        return [gradients]
    own = (_GROUP if work.trained > _LARGE else work.trained) / options.ranks
    nbytes = own * (6 if work.weight_bytes == 2 else 4)
    if options.zero_stage == 3:
        nbytes = min(4 * work.trained / options.ranks, _SUB_GROUP)
    copies = Component("gradients in float32", 0.0 if options.offload != "none" else nbytes, _MORE_RANKS)
    return [gradients, *(reduction if options.zero_stage == 3 else ()), copies]


def activations(work: Workload, options: TrainerOptions, kept: int, *, keeps_logits: bool = False) -> list[Component]:
    """Return what a forward and backward pass needs beside the weights, with ``kept`` layers not recomputed.

    ``keeps_logits``: those of all tokens stay until the backward pass, which computes their gradients in place.
    """
    shape = work.shape
    saved, inputs = _layer_bytes(work, options)
    again = shape.layers - kept
    stored = kept * saved + (min(again, AHEAD) if offloaded_bytes(work, options) else again) * inputs
    at_logits, at_layer = _logits(work, options, keeps_logits=keeps_logits), _layer(work, options)
    at_layer += 0.0 if kept else saved  # a layer computes again once the kept ones, which are the last, are through
    advice = "lower trainer.micro_batch_tokens"
    if not kept or options.checkpointing is False:
        advice += ", or set trainer.gradient_checkpointing = true"
    if at_layer > at_logits:
        return [Component("activations", stored + at_layer, advice)]
    return [
        Component("activations", stored, advice),
        Component("logits", at_logits, "lower trainer.micro_batch_tokens"),
    ]


def offloaded_bytes(work: Workload, options: TrainerOptions) -> float:
    """Return the most of the host's memory that holds inputs of a rank's layers; 0: they stay on the GPU."""
    nbytes = work.shape.layers * _layer_bytes(work, options)[1]
    return nbytes if options.checkpointing is not False and nbytes > OFFLOADED * options.gpu_bytes else 0.0


def _layer_bytes(work: Workload, options: TrainerOptions) -> tuple[float, float]:
    """Return what a layer keeps that is not recomputed, and its input. In float32, attention copies queries, keys and
    values, these for all heads, into rectangles (services/trainer/model/layers/attention.py), and keeps its result."""
    shape, tokens = work.shape, options.micro_batch_tokens * work.weight_bytes
    copies = 4 * shape.attention_width // shape.layers if work.weight_bytes == 4 else 0
    return float(tokens * (shape.saved_per_token + copies)), float(tokens * shape.hidden)


def _layer(work: Workload, options: TrainerOptions) -> float:
    """Return what a layer's backward pass adds to what the layer keeps: the gradients of the MLP's product and of the
    layer's input and output; with an adapter, the MLP's product without it; a tied output layer's gradient, which waits
    for that of the embeddings."""
    shape = work.shape
    width = shape.inner * (2 if work.lora_rank else 1) + 2 * shape.hidden
    waiting = _head_gradient(work) if shape.tied else 0.0
    return float(options.micro_batch_tokens * work.weight_bytes * width) + waiting


def _logits(work: Workload, options: TrainerOptions, *, keeps_logits: bool) -> float:
    tokens, per_byte = options.micro_batch_tokens, work.weight_bytes / 2
    chunk = min(tokens, options.chunk_tokens or tokens) * work.shape.vocabulary * per_byte
    kept = _all_logits(work, options) + chunk * _LOGIT_GRADIENT
    return (kept if keeps_logits else chunk * _LOGIT_BYTES) + _head_gradient(work)


def _head_gradient(work: Workload) -> float:
    return 0.0 if work.lora_rank else float(work.shape.vocabulary * work.shape.hidden * work.weight_bytes)


def _all_logits(work: Workload, options: TrainerOptions) -> float:
    return float(options.micro_batch_tokens * work.shape.vocabulary * work.weight_bytes)


def _kept(work: Workload, options: TrainerOptions, free_bytes: float) -> tuple[int, bool]:
    """Return the layers that are not recomputed, and whether all logits are kept, as ``model.recomputation`` decides."""
    layers = work.shape.layers
    if options.checkpointing != "auto":
        return 0 if options.checkpointing else layers, False
    saved, inputs = _layer_bytes(work, options)
    room = free_bytes - total(activations(work, options, 1))
    keeps_logits = bool(options.chunk_tokens) and _all_logits(work, options) * _RESERVE <= room
    room -= _all_logits(work, options) * keeps_logits
    added = saved if offloaded_bytes(work, options) else saved - inputs
    return max(1, min(layers, 1 + int(room // max(1.0, _RESERVE * added)))), keeps_logits


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """What of the rollout settings decides an engine's memory."""

    tensor_parallel: int = 1
    engines: int = 1
    utilization: float = 0.85
    sequences: int = 256
    """Decoded at a time by all engines of the GPU."""
    shadow: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class EngineMemory:
    """An engine's GPU."""

    components: Components
    cached_tokens: float
    """Room of the key-value cache, over the replica's GPUs."""


def engine_memory(work: Workload, options: EngineOptions, room_bytes: float, total_bytes: float) -> EngineMemory:
    """Return the memory of one GPU of a replica, which may use ``room_bytes`` of ``total_bytes``."""
    weights = options.engines * work.policy_bytes / options.tensor_parallel
    parallel = "raise rollout.vllm.tensor_parallel_size"
    logits = options.sequences * work.shape.vocabulary * 4.0 * LOGIT_COPIES / options.tensor_parallel
    fixed = [
        Component("weights", weights, parallel),
        Component("graphs and logits", options.engines * _GRAPHS + logits, "lower rollout.max_groups"),
        Component("context", options.engines * (CONTEXT + (_NCCL if options.tensor_parallel > 1 else 0.0))),
    ]
    record = options.engines * record_bytes(-(-options.sequences // options.engines), work.lengths.most)
    fixed.append(Component("record of logprobs", record, "lower rollout.max_groups or sampling.max_new_tokens"))
    shadow = options.engines * _shadow_bytes(work, options.tensor_parallel) * (options.shadow and not work.lora_rank)
    per_token = kv_bytes(work, options.tensor_parallel, work.longest)
    experts_bytes = routes.record_bytes(work, options.sequences, room_bytes / per_token if per_token else 0.0)
    experts = Component(routes.NAME, experts_bytes, "lower rollout.max_groups, or set trainer.router_replay = false")
    aside = [Component("shadow", shadow, 'set weights.shadow = "bucketed"'), experts]
    free = min(options.utilization * total_bytes, room_bytes - total(aside)) - total(fixed)
    needed = per_token * options.sequences * work.longest
    cache = Component("key-value cache", max(0.0, min(free, needed)), f"lower sampling.max_new_tokens, or {parallel}")
    return EngineMemory([*fixed, *aside, cache], cache.nbytes / per_token if per_token else 0.0)


def record_bytes(sequences: int, tokens: int) -> float:
    """Return an engine's record of logprobs (services/rollout/engines/vllm/token_record.py) of completions of ``tokens``, with
    that of half the size from which it grows."""
    rows, columns = (1 << (max(least, count) - 1).bit_length() for least, count in ((64, sequences), (1024, tokens)))
    return 1.5 * 4 * rows * columns


def _shadow_bytes(work: Workload, tensor_parallel: int) -> float:
    """Return a rank's shadow: its share, with a bucket to verify it; the whole if vLLM fuses experts (docs/weights.md)."""
    shape, whole = work.shape, float(work.policy_bytes)
    if tensor_parallel == 1 or shape.active < shape.decoder:
        return whole
    largest = shape.vocabulary * shape.hidden * whole / shape.weights
    return whole / tensor_parallel + max(BUCKET_BYTES, largest)


def several_engines(
    work: Workload, options: EngineOptions, memory: EngineMemory, total_bytes: float
) -> tuple[EngineMemory, float]:
    """Return the memory of several engines with all that they set aside, and the share of the GPU
    (rollout.vllm.gpu_memory_utilization) with which they start and have this key-value cache."""
    cache = max(memory.components[-1].nbytes, options.engines * LEAST_CACHE)
    logits = options.sequences * work.shape.vocabulary * 4.0 * LOGIT_COPIES
    needed = options.engines * (WEIGHT_COPIES * work.policy_bytes + ASIDE) + logits + cache
    share = math.ceil(100 * needed / total_bytes) / 100
    taken = share * total_bytes + options.shadow * _SHADOW_COPIES * options.engines * work.policy_bytes
    taken += sum(part.nbytes for part in memory.components if part.name == routes.NAME)
    aside = Component(
        "set aside", taken - total(memory.components), "lower rollout.max_groups or rollout.engines_per_gpu"
    )
    return dataclasses.replace(memory, components=[*memory.components, aside]), share


def kv_bytes(work: Workload, tensor_parallel: int, tokens: float) -> float:
    """Return the cache of one token on each GPU of a replica, on average over a sequence of ``tokens``, of which layers with
    a window keep that part; heads are copied where fewer than GPUs."""
    shape = work.shape
    numbers = shape.kv_per_token + shape.kv_per_windowed_token * min(1.0, shape.window / max(1.0, tokens))
    return numbers * work.weight_bytes / min(tensor_parallel, shape.kv_heads)
