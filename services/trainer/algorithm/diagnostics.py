"""Diagnostics of a step's tokens, over micro-batches, updates and ranks.

Figures are means over tokens that a policy drew (once per epoch), with ``w = exp(min(policy − behavior, 20))``::

    ess                       (Σ w)² / (tokens · Σ w²)      Kish 1965: 1 on policy, → 0 if few tokens carry the batch
    kl_mean, kl_max           k3 of KL(behavior ‖ policy)
    ratio_max                 the largest w
    logprob_gap               mean |policy − behavior|, nats; at lag 0 between engines
    clip_*_fraction           tokens whose gradient was clipped (see ``losses``)
    masked_fraction           tokens masked or rejected (see ``corrections``)
    entropy, reference_kl     of the policy; to the reference, by the run's estimator
"""

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.algorithm.loss.kl import bounded, estimate

_SUMS = (
    "tokens", "kl", "entropy", "clipped_low", "clipped_high", "masked", "ratio", "ratio_squared", "reference_kl", "gap",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class TokenFigures:
    """Per trained token of one forward pass, without gradients."""

    policy_logprobs_N: Tensor
    behavior_logprobs_N: Tensor
    entropy_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    masked_N: Tensor
    reference_kl_N: Tensor


class StepSums:
    """Sums on this rank; :meth:`over_ranks` returns the step's figures."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._largest = torch.zeros(2, dtype=torch.float64, device=device)  # k3, ratio

    def add(self, figures: TokenFigures) -> None:
        if not figures.policy_logprobs_N.numel():
            return
        kl_N = estimate(figures.behavior_logprobs_N, figures.policy_logprobs_N, "k3")
        ratio_N = torch.exp(bounded(figures.policy_logprobs_N - figures.behavior_logprobs_N)).double()
        gap_N = (figures.policy_logprobs_N - figures.behavior_logprobs_N).abs()
        parts = (
            torch.ones_like(kl_N), kl_N, figures.entropy_N, figures.clipped_low_N, figures.clipped_high_N,
            figures.masked_N, ratio_N, ratio_N.square(), figures.reference_kl_N, gap_N,
        )  # fmt: skip
        self._sums += torch.stack([part.double().sum() for part in parts])
        self._largest = torch.maximum(self._largest, torch.stack([kl_N.double().max(), ratio_N.max()]))

    def over_ranks(self) -> dict[str, float]:
        """Return the step's figures, none without tokens; collective."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        tokens = sums["tokens"]
        if not tokens:
            return {}
        kl_max, ratio_max = self._largest.tolist()
        return {
            "kl_mean": sums["kl"] / tokens,
            "kl_max": kl_max,
            "entropy": sums["entropy"] / tokens,
            "clip_fraction": (sums["clipped_low"] + sums["clipped_high"]) / tokens,
            "clip_low_fraction": sums["clipped_low"] / tokens,
            "clip_high_fraction": sums["clipped_high"] / tokens,
            "masked_fraction": sums["masked"] / tokens,
            "ess": effective_share(sums["ratio"], sums["ratio_squared"], sums["tokens"]),
            "ratio_max": ratio_max,
            "logprob_gap": sums["gap"] / tokens,
            "reference_kl": sums["reference_kl"] / tokens,
        }


def effective_share(ratios: float, squared_ratios: float, tokens: float) -> float:
    """Return the effective sample size as a share of the tokens."""
    return ratios**2 / (tokens * squared_ratios) if tokens and squared_ratios else 0.0


def explained_variance(returns_N: Tensor, values_N: Tensor) -> float:
    """Return ``1 − Var(returns − values) / Var(returns)`` (0 for constant returns); collective."""
    rest_mean, rest_deviation = moments(returns_N - values_N)
    _, deviation = moments(returns_N)
    return 1.0 - (rest_deviation / deviation) ** 2 if deviation > 0 and math.isfinite(rest_mean) else 0.0


def moments(values_N: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation (over n) over all ranks; collective."""
    sums = torch.stack([values_N.double().sum(), values_N.new_tensor(values_N.numel(), dtype=torch.float64)])
    dist.all_reduce(sums)
    total, count = sums.tolist()
    mean = total / max(1.0, count)
    squares = (values_N.double() - mean).square().sum().reshape(1)
    dist.all_reduce(squares)
    return mean, math.sqrt(float(squares) / max(1.0, count))
