"""Advantages of a group's samples from their rewards. Pure functions over numpy; no model, no batch, no settings.

GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 4):  A_i = (r_i − mean(r)) / (std(r) + ε)
Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, §3.2), which drops the division:  A_i = r_i − mean(r)
"""

from typing import Literal

import numpy as np

from shared.messages import Float32Array

_EPSILON = 1e-4  # as in the reference implementations; keeps a group without spread at exactly 0


def group_advantages(rewards: Float32Array, scale: Literal["group_std", "none"]) -> Float32Array:
    """Return one advantage per sample of one group.

    Args:
        rewards: float32, one per sample.
        scale: divide by the group's standard deviation (over the n samples, not n − 1), or not.

    >>> group_advantages(np.array([1, 0, 0, 1], dtype=np.float32), "none").tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    centred: Float32Array = rewards - np.float32(rewards.mean())
    if scale == "none":
        return centred
    scaled: Float32Array = centred / np.float32(rewards.std() + _EPSILON)
    return scaled
