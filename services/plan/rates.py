"""Seconds of each part of a step, from rooflines, corrected by a run's measurements.

::

    decoding step = bytes moved / bandwidth + kernels of each layer + scheduler in Python, per sequence
    several engines = while one engine's scheduler runs, kernels of the others do: in time slices one after the other,
                      under CUDA MPS side by side, where they delay each other
    forward and backward = max(operations / (peak · MFU), launching kernels, gathering weights)  per micro-batch
    update = bytes of states / bandwidth          transfer = bytes · copies that rank 0 sends / its network

The constants are measurements on H200s (benchmarks/results) and docs/plan.md compares them with these formulas.
"""

import dataclasses

from penstock.services.plan.hardware import Cluster
from penstock.services.plan.memory import TrainerOptions, kv_bytes
from penstock.services.plan.shapes import Shape
from penstock.services.plan.shortage import checkpoint_copy_bytes
from penstock.services.plan.workload import Workload
from penstock.shared.model.flops import BACKWARD, forward_flops

REACHED = 0.9
"""Share of the data sheet's memory bandwidth."""
_LAYER_S = 50e-6
"""Kernels of a layer in a decoding step, beside the bytes."""
_SCHEDULER_S, _SEQUENCE_S = 0.5e-3, 18e-6
"""vLLM's scheduler in each step, and for each sequence of it."""
_SLICES = 1.2
"""GPU time of engines that share a GPU in time slices."""
_DELAY = 0.43
"""Of the GPU time of each other engine, what it adds to an engine's own under CUDA MPS."""
SLOWED = 1.07
"""Seconds of a training step beside engines that generate on the same GPU, over those of one alone."""
_ALL_REDUCE_S = 20e-6
"""Of a layer's two sums over tensor parallel ranks."""
_LOGIT_COPIES = 6
_MFU_NARROW, _MFU = 0.42, 0.485
"""With heads of less than 128, and others, of a GPU that is busy."""
_LAUNCH_S = 6e-3
"""Python's time per layer of a forward and backward pass."""
_LAUNCH_WHOLE_S, _LAUNCH_MODULES_S = 7.7e-3, 11.6e-3
"""The same of a forward, a backward or a repeated forward pass with ZeRO stage 3, which gathers a layer's weights at once
or module by module."""
_MOST_WHOLE = 1e9
"""Weights of a layer that are gathered at once (services/trainer/model/memory/whole_layers.py)."""
_UPDATE_BYTES = 28.0
"""Read and written per weight in an optimizer step."""
_PREFILL_MFU = 0.4
FAN_OUT = 2
"""Of the replicas that relay, those that pull from the trainer (services/coordinator/policies/relay_tree.py)."""
_HEADER_S = 0.08
_WRITE, _READ = (5e9, 2e9), (20e9, 10e9)
"""Bytes per second that trainers write and that all replicas read: in memory of one host, and on storage that hosts share."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of the parts of a step in one layout."""

    decode_s: float
    """A decoding step of one sequence."""
    sequence_s: float
    """Of each further sequence."""
    prefill_s: float
    """Of what replicas read for a group."""
    train_s: float
    """Of a step that holds no tokens: the update, the snapshot, the commit."""
    token_s: float
    """Of each trained token."""
    transfer_s: float
    """From the commit to the version being live in all replicas."""
    switch_s: float = 0.0
    """From generating to training and back, where GPUs do both."""
    beside: float = 0.0
    """Speed of generation on the trainer's GPUs while it trains, over that of generation alone; 0: it pauses."""

    def decoding(self, sequences: float) -> float:
        return self.decode_s + self.sequence_s * max(0.0, sequences - 1)


def decode_seconds(
    work: Workload,
    cluster: Cluster,
    tensor_parallel: int,
    engines: int,
    sequences: float,
    *,
    mps: bool = False,
    host: float = 1.0,
) -> float:
    """Return the seconds in which every one of a replica's ``sequences`` grows by a token; ``mps``: under CUDA MPS.

    ``host``: seconds of the scheduler over those on the measured hosts.
    """
    busy = _busy_seconds(work, cluster, tensor_parallel, engines, sequences)
    scheduler = host * (_SCHEDULER_S + max(1.0, sequences / engines) * _SEQUENCE_S)
    side_by_side = busy * (1 + _DELAY * (engines - 1)) + scheduler
    if engines == 1:
        return side_by_side
    in_slices = _cycle_seconds(engines, _SLICES * busy, scheduler)
    return min(side_by_side, in_slices) if mps else in_slices


def _cycle_seconds(engines: int, gpu_s: float, host_s: float) -> float:
    """Return the seconds of a decoding step of each of several engines: a closed queue for the GPU, in which an engine
    waits for those that it finds there (mean value analysis, Reiser and Lavenberg 1980).
    """
    waiting = cycle_s = 0.0
    for count in range(1, engines + 1):
        on_gpu_s = gpu_s * (1 + waiting)
        cycle_s = on_gpu_s + host_s
        waiting = count * on_gpu_s / cycle_s
    return cycle_s


def speed_beside_training(
    work: Workload, cluster: Cluster, engines: int, sequences: float, *, host: float = 1.0
) -> float:
    """Return the speed of engines while the trainer trains on their GPU, over their speed alone, under CUDA MPS.

    The GPU's time is conserved: generation gains what training loses, over the share of the time that the engines alone
    keep the GPU busy.
    """
    busy = engines * _busy_seconds(work, cluster, 1, engines, sequences)
    share = busy / decode_seconds(work, cluster, 1, engines, sequences, mps=True, host=host)
    return min(1.0, (1 - 1 / SLOWED) / share)


def _busy_seconds(work: Workload, cluster: Cluster, tensor_parallel: int, engines: int, sequences: float) -> float:
    """Return the seconds for which one engine's decoding step alone keeps its GPU busy."""
    gpu, shape, each = cluster.gpu, work.shape, max(1.0, sequences / engines)
    context = work.prompt_tokens + work.sample_tokens / 2
    used = shape.weights if each * shape.active > shape.decoder else shape.active * each + shape.embeddings
    moved = used * work.weight_bytes / tensor_parallel + each * context * kv_bytes(work, tensor_parallel, context)
    moved += each * shape.vocabulary * 4 * _LOGIT_COPIES / tensor_parallel
    busy = moved / (gpu.bytes_per_s * REACHED) + shape.layers * _LAYER_S
    if tensor_parallel > 1:
        slow = cluster.network_bytes_per_s if tensor_parallel > cluster.per_node else gpu.link_bytes_per_s
        busy += shape.layers * (_ALL_REDUCE_S + 4 * each * shape.hidden * work.weight_bytes / slow)
    return busy


def train_seconds(work: Workload, cluster: Cluster, options: TrainerOptions, kept: int, tokens: float) -> float:
    """Return the seconds of forward and backward passes over ``tokens`` by all ranks."""
    own = tokens / options.ranks
    passes = max(1.0, own / options.micro_batch_tokens)
    mean = work.prompt_tokens + work.sample_tokens
    sizes = work.shape.sizes
    forward = forward_flops(round(own), round(own * mean / 2), round(own), sizes)
    again = (work.shape.layers - kept) / work.shape.layers
    computing = forward * (1 + BACKWARD + again) / (cluster.gpu.flops_per_s * mfu_of(work.shape))
    computing += (1 + 1 + again) * _exchanging(work, cluster, options, own)
    launching = passes * work.shape.layers * _launching(work, options, 1 + 1 + again)
    return max(computing, launching, passes * _gathering(work, cluster, options)) * work.passes


def _launching(work: Workload, options: TrainerOptions, passes: float) -> float:
    """Return the seconds of one layer."""
    if options.zero_stage < 3 or options.ranks == 1:
        return _LAUNCH_S
    whole = not work.lora_rank and work.shape.decoder / work.shape.layers <= _MOST_WHOLE
    return passes * (_LAUNCH_WHOLE_S if whole else _LAUNCH_MODULES_S)


def prefill_seconds(work: Workload, cluster: Cluster, tensor_parallel: int) -> float:
    """Return the seconds of a token of a prompt, on a replica's GPUs."""
    return 2.0 * work.shape.active / (cluster.gpu.flops_per_s * tensor_parallel * _PREFILL_MFU)


def mfu_of(shape: Shape) -> float:
    """Return the share of a GPU's peak that forward and backward passes reach."""
    return _MFU if shape.head_dim >= 128 else _MFU_NARROW


def _exchanging(work: Workload, cluster: Cluster, options: TrainerOptions, tokens: float) -> float:
    """Return the seconds in which ``tokens`` of a rank travel to their experts and back, in one pass."""
    together, shape = options.expert_parallel, work.shape
    rate = cluster.gpu.link_bytes_per_s if together <= cluster.per_node else cluster.network_bytes_per_s
    rows = tokens * shape.chosen * shape.layers * (1 - 1 / together)
    return 2 * rows * shape.hidden * work.weight_bytes / rate


def _gathering(work: Workload, cluster: Cluster, options: TrainerOptions) -> float:
    """Return the seconds in which ZeRO stage 3 moves weights three times, or other stages gradients once; of experts that
    all ranks share, nothing."""
    if options.ranks == 1:
        return 0.0
    shape, together = work.shape, options.expert_parallel
    elsewhere = shape.expert_weights if together == options.ranks else shape.expert_weights * (1 - 1 / together)
    moved = (3.0 if options.zero_stage == 3 else 1.0) * (shape.weights - elsewhere) * work.weight_bytes
    inside = moved / cluster.gpu.link_bytes_per_s
    outside = moved / (cluster.network_bytes_per_s * min(options.ranks, cluster.per_node))
    host = moved / cluster.host_bytes_per_s if options.offload == "all" else 0.0
    return (outside if options.ranks > cluster.per_node else inside) + host


def update_seconds(work: Workload, cluster: Cluster, options: TrainerOptions) -> float:
    """Return the seconds of an optimizer step, the filling of a snapshot, and the commit."""
    own = work.trained / options.shards(1)
    if options.offload != "none":
        update = _UPDATE_BYTES * own / cluster.host_bytes_per_s
    else:
        update = _UPDATE_BYTES * own / (cluster.gpu.bytes_per_s * REACHED)
    gathered = work.policy_bytes / cluster.gpu.link_bytes_per_s if options.zero_stage else 0.0
    written = 0.0 if options.snapshots and not work.lora_rank else work.published_bytes / _WRITE[cluster.nodes > 1]
    return update + gathered + written + 0.02


def transfer_seconds(work: Workload, cluster: Cluster, options: TrainerOptions, replicas: int, copies: int) -> float:
    """Return the seconds from a commit to its version being live in all replicas; ``copies``: those pulled from rank 0."""
    nbytes = work.published_bytes
    if not options.snapshots or work.lora_rank:
        return _HEADER_S + nbytes * replicas / _READ[cluster.nodes > 1]
    near = cluster.nodes == 1
    rate = 0.55 * cluster.gpu.link_bytes_per_s if near else cluster.network_bytes_per_s
    return _HEADER_S + nbytes * copies / rate


def checkpoint_seconds(work: Workload, cluster: Cluster, options: TrainerOptions) -> tuple[float, float]:
    """Return the seconds for which training waits for a checkpoint's copy, each rank's on its own link to the host and
    rank 0's also of whole weights, and those until it is written, by all ranks to one storage."""
    copied_s = checkpoint_copy_bytes(work, options, 1) / cluster.host_bytes_per_s
    return copied_s, copied_s + checkpoint_copy_bytes(work, options, options.ranks) / _WRITE[cluster.nodes > 1]
