"""Per-token estimates of the KL divergence.

For tokens drawn from p, with ``x = log q − log p`` (Schulman 2020, "Approximating KL divergence"), KL(p ‖ q) is
estimated by::

    k1 = −x                 unbiased, may be negative
    k2 = x² / 2             small bias, never negative; in a loss, its gradient is that of the KL
    k3 = exp(x) − 1 − x     unbiased, never negative; beyond 10 nats (x = 2.61) its tangent

As a *loss*, k1's gradient has mean 0 (refused), k2's is that of KL(p ‖ q), k3's about that of KL(q ‖ p). A token that
the reference finds far likelier would outweigh its batch in k3 (at x = 12 by a gradient of 1.6e5), so verl clamps k3 at
10 (``verl/trainer/ppo/core_algos.py``), without a gradient beyond. The tangent has one, of 12.6 per token, so that the
pull towards the reference remains.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Largest exponentiated log ratio, as in verl (``verl/trainer/ppo/core_algos.py``, on ``negative_approx_kl``).
float32 overflows at 88.7, and infinity · 0 is not a number.
"""
K3_TANGENT_AT = 2.61087
"""The log ratio at which k3 is 10 nats."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return ``min(log_ratio, 20)``, nats, without gradient beyond the bound."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def estimate(sampled_logprobs_N: Tensor, other_logprobs_N: Tensor, estimator: Estimator) -> Tensor:
    """Return KL(sampled ‖ other) at each token drawn by ``sampled`` (N, nats)."""
    difference_N = other_logprobs_N - sampled_logprobs_N
    if estimator == "k1":
        return -difference_N
    if estimator == "k2":
        return 0.5 * difference_N.square()
    near_N = difference_N.clamp(max=K3_TANGENT_AT)
    return torch.expm1(near_N) - near_N + math.expm1(K3_TANGENT_AT) * (difference_N - near_N)
