"""What a trainer has in a host's memory, and what fits neither there nor on a GPU."""

import dataclasses

from penstock.services.plan.hardware import Cluster
from penstock.services.plan.memory import Component, Table, TrainerOptions, optimizer_states, total
from penstock.services.plan.workload import Workload

_OFFLOADED_BYTES = 18
"""Of a weight: master weight and moments, and DeepSpeed's gradients in float32 with a buffer in the weights' type."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryShortage:
    layout: str
    needed_bytes: float
    limit_bytes: float
    component: Component
    """The largest that a setting reduces."""


def on_gpu(layout: str, table: Table, limit_bytes: float) -> MemoryShortage:
    phase = max(table.values(), key=total)
    largest = max((part for part in phase if part.advice), key=lambda part: part.nbytes)
    return MemoryShortage(layout, total(phase), limit_bytes, largest)


def on_host(
    layout: str, work: Workload, options: TrainerOptions, cluster: Cluster, *, moves: bool = False
) -> MemoryShortage | None:
    """Return what a host's memory cannot hold of a trainer, if that memory is known: what is offloaded, or ``moves`` there
    by turns. A checkpoint's copy isn't counted: without room for it, the checkpoint is written at once.
    """
    ranks = min(options.ranks, cluster.per_node)
    needed = offloaded_states_bytes(work, options, ranks)
    if moves and options.offload == "none":
        needed = ranks * total(optimizer_states(work.trained, work, options))
    if not cluster.host_memory_bytes or needed <= cluster.host_memory_bytes:
        return None
    states = Component("states of the optimizer, or weights", needed, "train on more hosts, or offload less")
    return MemoryShortage(f"{layout}, in a host's memory", needed, cluster.host_memory_bytes, states)


def checkpoint_copy_bytes(work: Workload, options: TrainerOptions, ranks: int) -> float:
    """Return the most of a host's memory that the copy of a checkpoint takes; ``ranks`` on that host."""
    trained = [work.trained, *([work.critic.weights] if work.critic else [])]
    kept = dataclasses.replace(options, offload="none")
    states = sum(ranks * total(optimizer_states(weights, work, kept)) for weights in trained)
    return states + (0.0 if options.zero_stage == 3 else sum(trained) * work.weight_bytes)


def offloaded_states_bytes(work: Workload, options: TrainerOptions, ranks: int) -> float:
    """Return what ``trainer.offload`` has in a host's memory, a critic's aside; ``ranks`` on that host."""
    if options.offload == "none":
        return 0.0
    weights = work.policy_bytes if options.offload == "all" else 0.0
    return ranks * (_OFFLOADED_BYTES * work.trained + weights) / options.ranks
