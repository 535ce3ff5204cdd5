"""Logprobs and entropies of tokens from hidden states, without the logits of all tokens at once.

    logits_V = output(hidden_D) / the token's temperature,  logprob = log_softmax(logits)_target,  entropy = −Σ p_V log p_V

Tokens are taken in chunks. Where gradients are wanted, a chunk's logits are computed again in the backward pass instead of
kept, so that memory holds ``chunk × vocabulary`` numbers and not ``tokens × vocabulary``; the output layer is computed once
more for it. The output layer is called as a module once, whatever the number of chunks: ZeRO stage 3 gathers its weights then, and ranks
that gathered different numbers of times would wait for one another for ever. Knows no micro-batch and no model.

Shapes: ``N`` tokens, ``D`` hidden size, ``V`` vocabulary. Logprobs and entropies are in nats, float32.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)  # without slots: ZeRO stage 3 looks through the output's __dict__
class TokenLogprobs:
    """Of each trained token: its logprob, and the entropy of the distribution it was drawn from, nats."""

    policy_logprobs_N: Tensor
    entropy_N: Tensor


def token_logprobs(
    hidden_ND: Tensor,
    output: nn.Module,
    targets_N: Tensor,
    temperatures_N: Tensor,
    chunk_tokens: int = 0,
    *,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Return logprob and entropy of each target.

    Args:
        hidden_ND: what predicts each target.
        output: the output layer, hidden states to logits.
        targets_N: token ids (int64).
        temperatures_N: what the logits of each are divided by, float32.
        chunk_tokens: how many tokens a chunk has; 0: all.
        entropy_gradient: whether entropies carry a gradient.
    """
    logits = output.forward

    def of(hidden_ND: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
        return _plain(hidden_ND, logits, targets_N, temperatures_N, entropy_gradient)

    def in_chunks(*whole: Tensor) -> tuple[Tensor, Tensor]:
        if not chunk_tokens or len(targets_N) <= chunk_tokens:
            return of(*whole)
        chunks = zip(*(torch.split(one, chunk_tokens) for one in whole), strict=True)
        parts = [_recomputed(of, *chunk) if torch.is_grad_enabled() else of(*chunk) for chunk in chunks]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    with _forward(output, in_chunks):
        return TokenLogprobs(*output(hidden_ND, targets_N, temperatures_N))


@contextlib.contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``module``, called within, do ``forward`` between its hooks."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _recomputed(of: Callable[..., tuple[Tensor, Tensor]], *chunk: Tensor) -> tuple[Tensor, Tensor]:
    # The shapes of ZeRO stage 3's weights change while they are away, which the check would take for a mistake.
    found: tuple[Tensor, Tensor] = checkpoint(of, *chunk, use_reentrant=False, determinism_check="none")
    return found


def _plain(
    hidden_ND: Tensor,
    logits: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperatures_N: Tensor,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits_NV = logits(hidden_ND).float() / temperatures_N[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    chosen_N = logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return chosen_N, entropy_N
