"""Estimates of the KL divergence per token, and the coefficient of a KL penalty. Pure functions.

For tokens drawn from p, with ``x = log q − log p`` (Schulman 2020, "Approximating KL divergence"), KL(p ‖ q) is estimated by::

    k1 = −x                 unbiased, may be negative
    k2 = x² / 2             small bias, never negative; in a loss, its gradient is that of the KL
    k3 = exp(x) − 1 − x     unbiased, never negative

In a *loss* only the gradient counts: k1's has mean 0 (it penalises nothing but noise), k2's is that of KL(p ‖ q), k3's that of
KL(q ‖ p) where the two are near. In a *reward* k1 is the usual one.
"""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""The largest log ratio that is exponentiated: verl's bound (``verl/trainer/ppo/core_algos.py``, on ``negative_approx_kl``).
float32 overflows at 88.7, and infinity times an advantage of 0 is not a number. verl bounds −20 too, which needs no bound:
there the ratio is 2e-9, and 0 is as good."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return ``min(log_ratio, 20)``, nats: what may be exponentiated. Beyond the bound no gradient flows through it."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def estimate(sampled_logprobs_N: Tensor, other_logprobs_N: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimate of KL(sampled ‖ other) at each token (N, nats), for tokens that ``sampled`` drew.

    k3 is that of ``min(x, 20)``: constant from there on.
    """
    difference_N = other_logprobs_N - sampled_logprobs_N
    if estimator == "k1":
        return -difference_N
    if estimator == "k2":
        return 0.5 * difference_N.square()
    difference_N = bounded(difference_N)
    return torch.expm1(difference_N) - difference_N


HORIZON = 10_000
"""Samples that it takes to change the coefficient by the whole error: the value of Ziegler et al."""


def next_coefficient(coefficient: float, measured: float, target: float, samples: int, horizon: int = HORIZON) -> float:
    """Return the coefficient of the next step, so that the KL (mean per token, nats) moves towards ``target``.

    ``e = clip(measured / target − 1, −0.2, 0.2)``, ``coefficient · (1 + e · samples / horizon)`` (Ziegler et al. 2019,
    arXiv:1909.08593, §2.2). ``horizon`` is in samples: how many it takes to change the coefficient by the whole error.
    """
    error = min(0.2, max(-0.2, measured / target - 1.0))
    return coefficient * (1.0 + error * samples / horizon)
