"""The clip of whole sequences: ``clip`` with s = exp(mean_t (π_t − anchor_t)) (Zheng et al. 2025, GSPO, arXiv:2507.18071)."""

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.kinds import TokenLoss, Tokens
from penstock.services.trainer.algorithm.loss.aggregation import sequence_means, spread
from penstock.services.trainer.algorithm.loss.kl import MAX_LOG_RATIO, bounded
from penstock.services.trainer.algorithm.rules.clip import clipped
from penstock.shared.settings.algorithm import AlgorithmSettings


def loss(tokens: Tokens, algorithm: AlgorithmSettings) -> TokenLoss:
    lengths_S, (low, high, *_) = tokens.inputs.lengths_S, algorithm.clip
    return sequence_clipped_ratio(tokens.policy_N, tokens.anchor_N, tokens.advantages_N, lengths_S, low, high)


def sequence_clipped_ratio(
    policy_logprobs_N: Tensor,
    anchor_logprobs_N: Tensor,
    advantages_N: Tensor,
    lengths_S: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Return GSPO's loss, as ``s_t = sg(s) · exp(π_t − sg(π_t))``; advantages may differ within a sample."""
    with torch.no_grad():
        mean_N = spread(sequence_means(policy_logprobs_N - anchor_logprobs_N, lengths_S), lengths_S)
        sequence_ratio_N = torch.exp(bounded(mean_N))
    moved_N = torch.where(mean_N > MAX_LOG_RATIO, 0.0, policy_logprobs_N - policy_logprobs_N.detach())
    return clipped(sequence_ratio_N * torch.exp(moved_N), advantages_N, clip_low, clip_high)
