"""Policy losses over flat tokens. Pure functions of tensors; no model, no batch, no settings.

Shapes: ``N`` trained tokens of one micro-batch, in any order. Logprobs are in nats.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss summed over tokens (divide by the tokens of the global batch), and which tokens were clipped."""

    sum: Tensor
    clipped_N: Tensor


def clipped_ratio(
    policy_logprobs_N: Tensor, behavior_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Return PPO's clipped surrogate against the behavior policy, summed over tokens.

    ``ρ = exp(policy − behavior)``, ``L = −Σ min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A)`` (Schulman et al. 2017,
    arXiv:1707.06347, eq. 7; separate bounds: Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 8). A token is clipped when the
    bound took its gradient away.
    """
    ratio_N = torch.exp(policy_logprobs_N - behavior_logprobs_N)
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    return PolicyLoss(sum=-torch.minimum(free_N, bounded_N).sum(), clipped_N=(bounded_N < free_N).detach())


def kl_k3(behavior_logprobs_N: Tensor, policy_logprobs_N: Tensor) -> Tensor:
    """Return the k3 estimate of KL(behavior ‖ policy) per token sampled from behavior, in nats; never negative.

    ``k3 = exp(x) − 1 − x`` with ``x = policy − behavior`` (Schulman 2020, "Approximating KL divergence").
    """
    difference_N = policy_logprobs_N - behavior_logprobs_N
    return torch.expm1(difference_N) - difference_N
