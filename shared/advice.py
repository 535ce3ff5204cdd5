"""What bounds a run, by its own figures, and what would help."""

import math
from collections.abc import Mapping
from typing import Any, Literal

_BOUND = 0.2
"""Share of a step that the trainer waits, from which the replicas are what bounds it."""


def advice(
    metrics: Mapping[str, Any], replicas: int, on_gpus: bool, sharing: Literal["", "in turn", "at once"] = ""
) -> str:
    """Return what bounds a run by a step's metrics (as in metrics.jsonl), and what would help; "" if unknown.

    ``sharing``: how trainer and replicas share GPUs. Without GPUs services share a machine's cores: no figure says what
    more of them would bring.
    """
    step_s, wait_s = (float(metrics.get(name) or 0.0) for name in ("step_s", "phase_wait_s"))
    if step_s <= 0 or wait_s <= 0 or replicas < 1:
        return ""
    share = min(1.0, wait_s / step_s)
    if not on_gpus:
        return f"{'trainer' if share < _BOUND else 'rollout'}-bound: the trainer waits {share:.0%} of a step"
    if share < _BOUND:
        return f"trainer-bound: it waits {share:.0%}; more replicas would not help, more trainer.ranks would"
    if not metrics.get("lag_max") and sharing != "in turn":
        return f"synchronous: the trainer waits {share:.0%}; algorithm.max_lag = 1 would generate meanwhile"
    if sharing:
        return (
            f"rollout-bound: the trainer waits {share:.0%} for replicas on its own GPUs; more of them would help on other GPUs "
            "only (`penstock plan` compares layouts)"
        )
    needed = math.ceil(replicas / max(1 - share, 0.01))
    more = max(1, min(needed - replicas, replicas))
    faster = step_s / max(step_s - wait_s, step_s * replicas / (replicas + more))
    word = "one more replica" if more == 1 else f"{more} more replicas"
    return f"rollout-bound: the trainer waits {share:.0%}; {word} would be {faster:.1f} times as fast"
