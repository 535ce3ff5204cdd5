"""PPO's clipped ratio of each token::

−min(ρ A, clip(ρ, 1−low, 1+high) A)           Schulman et al. 2017, PPO, arXiv:1707.06347, eq. 7;
                                              low ≠ high: Yu et al. 2025, arXiv:2503.14476, eq. 8
dual clip: … and at least c A if A < 0        Ye et al. 2020, arXiv:1912.09729
"""

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.kinds import TokenLoss, Tokens
from penstock.services.trainer.algorithm.loss.kl import bounded
from penstock.shared.settings.algorithm import AlgorithmSettings


def loss(tokens: Tokens, algorithm: AlgorithmSettings) -> TokenLoss:
    return clipped_ratio(tokens.policy_N, tokens.anchor_N, tokens.advantages_N, *algorithm.clip)


def clipped_ratio(
    policy_logprobs_N: Tensor,
    anchor_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> TokenLoss:
    """Return PPO's clipped surrogate per token; ``dual_clip`` c > 1 bounds ρ if A < 0, 0 does not."""
    ratio_N = torch.exp(bounded(policy_logprobs_N - anchor_logprobs_N))
    return clipped(ratio_N, advantages_N, clip_low, clip_high, dual_clip)


def clipped(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> TokenLoss:
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
    return TokenLoss(-objective_N, low_N, high_N)
