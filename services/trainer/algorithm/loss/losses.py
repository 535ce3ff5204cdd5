"""Policy losses of each token.

``N`` trained tokens, ``lengths_S`` of each sample. Logprobs are in nats, ``π`` the trained policy's. The ratio
``ρ_t = exp(π_t − anchor_t)`` starts from the *anchor*: behavior or proximal logprobs::

    clip             −min(ρ A, clip(ρ, 1−low, 1+high) A)           Schulman et al. 2017, PPO, arXiv:1707.06347, eq. 7;
                                                                   low ≠ high: Yu et al. 2025, arXiv:2503.14476, eq. 8
      dual clip      … and at least c A if A < 0                   Ye et al. 2020, arXiv:1912.09729
    gspo             the same with s = exp(mean_t (π_t − anchor_t)) Zheng et al. 2025, GSPO, arXiv:2507.18071
    cispo            −sg(min(ρ, 1+high)) A π                        MiniMax 2025, CISPO, arXiv:2506.13585
    policy_gradient  −A π                                           Williams 1992, REINFORCE

``sg`` stops the gradient. A token is *clipped* if the bound removed its gradient (for CISPO: limited its weight).
Ratios are at most e^20 (``kl.bounded``), and beyond have no gradient; GSPO's are those of whole sequences.
"""

import dataclasses

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.loss.aggregation import sequence_means, spread
from penstock.services.trainer.algorithm.loss.kl import MAX_LOG_RATIO, bounded


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of each token, and whether its ratio was clipped below or above."""

    loss_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor


def clipped_ratio(
    policy_logprobs_N: Tensor,
    anchor_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """Return PPO's clipped surrogate per token; ``dual_clip`` c > 1 bounds ρ if A < 0, 0 does not."""
    ratio_N = torch.exp(bounded(policy_logprobs_N - anchor_logprobs_N))
    return _clip(ratio_N, advantages_N, clip_low, clip_high, dual_clip)


def sequence_clipped_ratio(
    policy_logprobs_N: Tensor,
    anchor_logprobs_N: Tensor,
    advantages_N: Tensor,
    lengths_S: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return GSPO's loss, as ``s_t = sg(s) · exp(π_t − sg(π_t))``; advantages may differ within a sample."""
    with torch.no_grad():
        mean_N = spread(sequence_means(policy_logprobs_N - anchor_logprobs_N, lengths_S), lengths_S)
        sequence_ratio_N = torch.exp(bounded(mean_N))
    moved_N = torch.where(mean_N > MAX_LOG_RATIO, 0.0, policy_logprobs_N - policy_logprobs_N.detach())
    ratio_N = sequence_ratio_N * torch.exp(moved_N)
    return _clip(ratio_N, advantages_N, clip_low, clip_high, 0.0)


def clipped_weight(
    policy_logprobs_N: Tensor, anchor_logprobs_N: Tensor, advantages_N: Tensor, clip_high: float
) -> PolicyLoss:
    """Return CISPO's loss per token, with weights of at most ``1 + clip_high``."""
    ratio_N = torch.exp(bounded(policy_logprobs_N.detach() - anchor_logprobs_N))
    weights_N = ratio_N.clamp(max=1.0 + clip_high)
    return PolicyLoss(
        loss_N=-weights_N * advantages_N * policy_logprobs_N,
        clipped_low_N=torch.zeros_like(ratio_N, dtype=torch.bool),
        clipped_high_N=ratio_N > 1.0 + clip_high,
    )


def policy_gradient(policy_logprobs_N: Tensor, advantages_N: Tensor) -> PolicyLoss:
    never_N = torch.zeros_like(policy_logprobs_N, dtype=torch.bool)
    return PolicyLoss(-advantages_N * policy_logprobs_N, never_N, never_N)


def _clip(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float, dual_clip: float) -> PolicyLoss:
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    objective_N = torch.minimum(free_N, bounded_N)
    taken_N = (bounded_N < free_N).detach()
    low_N, high_N = taken_N & (advantages_N < 0), taken_N & (advantages_N > 0)
    if dual_clip:
        floor_N = dual_clip * advantages_N
        over_N = (advantages_N < 0) & (objective_N < floor_N)
        objective_N = torch.where(over_N, floor_N, objective_N)
        high_N = high_N | over_N.detach()
    return PolicyLoss(-objective_N, low_N, high_N)
