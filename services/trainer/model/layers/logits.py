"""Logprobs and entropies of tokens from hidden states, in chunks.

    logits_V = output(hidden_D), scaled or capped     (shared/model/logits_transform.py)
    logprob and entropy at the token's temperature    (shared/model/logits.py)

If memory is short (``recomputation``), the backward pass recomputes logits. The output layer is called once for all
chunks: at ZeRO stage 3 different numbers of calls would deadlock.

Shapes: ``N`` tokens, ``D`` hidden size, ``V`` vocabulary. Logprobs and entropies are in nats, float32.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.shared.model.logits import logprobs_and_entropies, partition, restrict
from penstock.shared.model.logits_projection import LogitsType, projection
from penstock.shared.model.logits_transform import PLAIN, LogitsTransform


@dataclasses.dataclass(frozen=True)  # no slots: ZeRO stage 3 searches the output's __dict__
class TokenLogprobs:
    """Logprob of each trained token, and entropy of its distribution, in nats.

    With ``tops_NK``, also the logprobs of these tokens, and of all others together.
    """

    policy_logprobs_N: Tensor
    entropy_N: Tensor
    top_logprobs_NK: Tensor | None = None
    others_logprobs_N: Tensor | None = None


def token_logprobs(
    hidden_ND: Tensor,
    output: nn.Module,
    targets_N: Tensor,
    temperatures_N: Tensor,
    chunk_tokens: int = 0,
    *,
    transform: LogitsTransform = PLAIN,
    entropy_gradient: bool = False,
    fused: bool = True,
    kind: LogitsType = "model",
    keep: bool = False,
    support: tuple[Tensor, Tensor] | None = None,
    tops_NK: Tensor | None = None,
) -> TokenLogprobs:
    """Return logprob and entropy of each target.

    Args:
        hidden_ND: what predicts each target.
        output: the output layer.
        targets_N: token ids (int64).
        temperatures_N: divisors of the logits, float32.
        chunk_tokens: 0: all.
        transform: of hidden states and logits.
        entropy_gradient: whether entropies carry one.
        fused: by one GPU kernel.
        kind: number type of the logits.
        keep: logits for the backward pass.
        support: ids (N × K) and sizes (N) of what could be drawn (:func:`penstock.shared.model.logits.restrict`); None: all.
        tops_NK: ids of tokens whose logprobs are returned too, over all tokens; not with a support.
    """
    assert support is None or tops_NK is None
    logits = projection(output, kind)

    def of(hidden_ND: Tensor, targets_N: Tensor, temperatures_N: Tensor, *ids: Tensor) -> tuple[Tensor, ...]:
        logits_NV = transform.after(logits(transform.before(hidden_ND)))
        sampled = logprobs_and_entropies(
            restrict(logits_NV, *ids) if support is not None else logits_NV,
            targets_N,
            temperatures_N,
            entropy_gradient=entropy_gradient,
            fused=fused,
        )
        return sampled if tops_NK is None else (*sampled, *partition(logits_NV, ids[0], temperatures_N, fused=fused))

    def in_chunks(*whole: Tensor) -> tuple[Tensor, ...]:
        if not chunk_tokens or len(targets_N) <= chunk_tokens:
            return of(*whole)
        chunks = zip(*(torch.split(tensor, chunk_tokens) for tensor in whole), strict=True)
        again = torch.is_grad_enabled() and not keep
        parts = [_recomputed(of, *chunk) if again else of(*chunk) for chunk in chunks]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    ids = support if support is not None else () if tops_NK is None else (tops_NK,)
    with forward_replaced(output, in_chunks):
        return TokenLogprobs(*output(hidden_ND, targets_N, temperatures_N, *ids))


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _recomputed(of: Callable[..., tuple[Tensor, ...]], *chunk: Tensor) -> tuple[Tensor, ...]:
    # ZeRO stage 3 changes the shapes of released weights, which the check would refuse.
    outputs: tuple[Tensor, ...] = checkpoint(of, *chunk, use_reentrant=False, determinism_check="none")
    return outputs
