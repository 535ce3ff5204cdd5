"""From token losses to the loss of a batch.

``N`` tokens, ``lengths_S`` of each sample. The loss is a sum over micro-batches and ranks (:func:`total`) over the
batch's divisor (:func:`divisor`)::

    token      Σ_t loss_t / tokens                      equal weight of tokens       DAPO, arXiv:2503.14476, eq. 8
    sequence   Σ_i (1/|y_i|) Σ_t loss_t / samples       equal weight of samples      GRPO, arXiv:2402.03300, eq. 3
    constant   Σ_t loss_t / (samples × longest)         independent of lengths       Dr. GRPO, arXiv:2503.20783
"""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]


def total(loss_N: Tensor, lengths_S: Tensor, aggregation: Aggregation) -> Tensor:
    """Return a micro-batch's undivided loss (a scalar)."""
    if aggregation == "sequence":
        return sequence_means(loss_N, lengths_S).sum()
    return loss_N.sum()


def divisor(aggregation: Aggregation, tokens: int, samples: int, max_tokens: int) -> float:
    count = {"token": tokens, "sequence": samples, "constant": samples * max_tokens}[aggregation]
    return float(max(1, count))


def sequence_sums(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """Return the sum over each sample's tokens (S); deterministic, also on a GPU."""
    if lengths_S.numel() == 0:
        return values_N
    return torch.segment_reduce(values_N, "sum", lengths=lengths_S, axis=0)


def sequence_means(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """Return the mean over each sample's tokens (S)."""
    return sequence_sums(values_N, lengths_S) / lengths_S


def spread(values_S: Tensor, lengths_S: Tensor) -> Tensor:
    """Give each token its sample's value (N)."""
    return torch.repeat_interleave(values_S, lengths_S, dim=0)
