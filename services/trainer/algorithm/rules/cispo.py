"""A clipped weight, which keeps every token's gradient: −sg(min(ρ, 1+high)) A π (MiniMax 2025, CISPO, arXiv:2506.13585)."""

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.kinds import TokenLoss, Tokens
from penstock.services.trainer.algorithm.loss.kl import bounded
from penstock.shared.settings.algorithm import AlgorithmSettings


def loss(tokens: Tokens, algorithm: AlgorithmSettings) -> TokenLoss:
    return clipped_weight(tokens.policy_N, tokens.anchor_N, tokens.advantages_N, algorithm.clip[1])


def clipped_weight(
    policy_logprobs_N: Tensor, anchor_logprobs_N: Tensor, advantages_N: Tensor, clip_high: float
) -> TokenLoss:
    """Return CISPO's loss per token, with weights of at most ``1 + clip_high``."""
    ratio_N = torch.exp(bounded(policy_logprobs_N.detach() - anchor_logprobs_N))
    weights_N = ratio_N.clamp(max=1.0 + clip_high)
    return TokenLoss(
        loss_N=-weights_N * advantages_N * policy_logprobs_N,
        clipped_low_N=torch.zeros_like(ratio_N, dtype=torch.bool),
        clipped_high_N=ratio_N > 1.0 + clip_high,
    )
