"""From token losses to the loss of a batch.

A batch's loss is the sum of its *streams*, each over tokens of its own::

    rl             the policy loss                              tokens that a policy drew
    ce             −log π of each token, × ``imitation``        tokens of demonstrations
    entropy        − the entropy bonus                          as rl
    reference_kl   the KL penalty, unless it is of rewards      as rl
    distillation   the KL to the teacher's top k (``top_k``)    as rl

A stream's loss is a sum over its tokens (:func:`total`) over its own divisor (:func:`divisor`). Both cover all
micro-batches of all ranks of one optimizer update, and only trained tokens; so neither packing nor a split for lack of
memory changes it. ``N`` tokens, ``lengths_S`` of each sample; tokens and samples are those of the stream::

    token      Σ_t loss_t / tokens                      equal weight of tokens       DAPO, arXiv:2503.14476, eq. 8
    sequence   Σ_i (1/|y_i|) Σ_t loss_t / samples       equal weight of samples      GRPO, arXiv:2402.03300, eq. 3
    constant   Σ_t loss_t / (samples × longest)         independent of lengths       Dr. GRPO, arXiv:2503.20783

Entropy and KL, whose coefficients are per nat of a token, are means over tokens with any loss, preferences too; so is
``ce`` with ``constant``, as ``longest`` bounds samples and not demonstrations (:func:`of_stream`).
"""

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]
Stream = Literal["rl", "ce", "entropy", "reference_kl", "distillation"]
STREAMS: tuple[Stream, ...] = get_args(Stream)


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """What a stream trains in an optimizer update, on all ranks."""

    tokens: int
    samples: int


def of_stream(stream: Stream, aggregation: Aggregation) -> Aggregation:
    """Return how a stream is aggregated, given ``algorithm.aggregation``."""
    per_token = stream in ("entropy", "reference_kl") or (stream == "ce" and aggregation == "constant")
    return "token" if per_token else aggregation


def total(loss_N: Tensor, lengths_S: Tensor, aggregation: Aggregation) -> Tensor:
    """Return a micro-batch's undivided loss (a scalar)."""
    if aggregation == "sequence":
        return sequence_means(loss_N, lengths_S).sum()
    return loss_N.sum()


def divisor(aggregation: Aggregation, count: Count, max_tokens: int) -> float:
    by_kind = {"token": count.tokens, "sequence": count.samples, "constant": count.samples * max_tokens}
    return float(max(1, by_kind[aggregation]))


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
