"""Off-policy corrections: weights for tokens drawn by another policy than the anchor.

With ``w_t = exp(anchor_t − behavior_t)`` and ``W = Π_t w_t`` of a sample::

    token_tis        min(w_t, high)                      truncated importance sampling: Yao et al. 2025, "Your efficient
                                                         RL framework secretly brings you off-policy RL training";
                                                         decoupled PPO: Hilton et al. 2021, arXiv:2110.00641, and
                                                         AReaL, arXiv:2505.24298
    sequence_tis     min(W, high)                        the same for whole samples
    token_mask       w_t if low ≤ w_t ≤ high, else 0     IcePop: Ling Team 2025, Ring-1T, arXiv:2510.18855
    sequence_mask    W if low ≤ W ≤ high, else 0         masked importance sampling: Liu et al. 2025, "When speed kills
                                                         stability"
    geometric_mask   1 if low ≤ W^(1/|y|) ≤ high, else 0         rejects whole samples

Weights carry no gradient and are at most e^20 (``kl.bounded``); 0 *masks* the token.
"""

from typing import Literal

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.loss.aggregation import sequence_means, sequence_sums, spread
from penstock.services.trainer.algorithm.loss.kl import bounded

Correction = Literal["token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask"]


def weights(
    anchor_logprobs_N: Tensor, behavior_logprobs_N: Tensor, lengths_S: Tensor, kind: Correction, low: float, high: float
) -> Tensor:
    """Return the weight of each token (N, no gradient); only masks use ``low``."""
    difference_N = anchor_logprobs_N.detach() - behavior_logprobs_N
    if kind == "token_tis":
        return torch.exp(bounded(difference_N)).clamp(max=high)
    if kind == "token_mask":
        return _inside(torch.exp(bounded(difference_N)), low, high)
    if kind == "sequence_tis":
        return spread(torch.exp(bounded(sequence_sums(difference_N, lengths_S))).clamp(max=high), lengths_S)
    if kind == "sequence_mask":
        return spread(_inside(torch.exp(bounded(sequence_sums(difference_N, lengths_S))), low, high), lengths_S)
    kept_S = _inside(torch.exp(bounded(sequence_means(difference_N, lengths_S))), low, high) > 0
    return spread(kept_S.to(difference_N.dtype), lengths_S)


def log_linear(behavior_logprobs_N: Tensor, policy_logprobs_N: Tensor, lags_N: Tensor) -> Tensor:
    """Return proximal logprobs interpolated by lag (N, no gradient).

    ``proximal = α behavior + (1 − α) policy`` with ``α = 1/lag``, and α = 0 at lag 0 (Li et al. 2025, A-3PO,
    arXiv:2512.06547). The lag is that of each token's version.
    """
    weight_N = torch.where(lags_N > 0, 1.0 / lags_N.clamp(min=1), torch.zeros_like(behavior_logprobs_N))
    return weight_N * behavior_logprobs_N + (1.0 - weight_N) * policy_logprobs_N.detach()


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
