"""What a trainer has in a host's memory: a checkpoint's copy while it is written, and what is offloaded."""

import dataclasses

from penstock.services.plan.memory import TrainerOptions, optimizer_states, total
from penstock.services.plan.workload import Workload

_OFFLOADED_BYTES = 18
"""Of a weight: master weight and moments, and DeepSpeed's gradients in float32 with a buffer in the weights' type."""


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
