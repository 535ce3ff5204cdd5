"""Logprobs and entropies (nats, float32) from logits: by torch operations, or a fused GPU kernel.

    x_V = logits_V / temperature,  p = softmax(x),  logprob = x_target − log Σ e^x,  entropy = −Σ p_V log p_V

Torch's float32 copies cost a third of a training step (0.5B model, 152k words; ``benchmarks/trainer/step.py``). The kernel
reads each logit once in its own type, and once more for the gradient::

    ∂ logprob / ∂ x_v = [v = target] − p_v              ∂ entropy / ∂ x_v = −p_v (log p_v + entropy)

Shapes: ``N`` tokens, ``V`` vocabulary. Callers chunk large N.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor


def logprobs_and_entropies(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    entropy_gradient: bool = False,
    fused: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return each target's logprob, and its distribution's entropy.

    Args:
        targets_N: token ids (int64).
        temperatures_N: float32.
        entropy_gradient: whether entropies carry a gradient.
        fused: use the kernel if available.
    """
    if fused and logits_NV.is_cuda and _has_triton():
        outputs: tuple[Tensor, Tensor] = _Fused.apply(  # type: ignore[no-untyped-call]
            logits_NV, targets_N, temperatures_N, entropy_gradient
        )
        return outputs
    logprobs_NV = _all_logprobs(logits_NV, temperatures_N)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        finite_NV = logprobs_NV.clamp(min=torch.finfo(torch.float32).min)  # 0 · log 0 is 0, and so is its gradient
        entropy_N = -(finite_NV.exp() * finite_NV).sum(-1)
    return _chosen(logprobs_NV, targets_N), entropy_N


def restrict(logits_NV: Tensor, support_NK: Tensor, sizes_N: Tensor) -> Tensor:
    """Return the logits with −∞ for tokens that could not be drawn.

    Args:
        support_NK: token ids (int64): those that could be drawn where a size is positive, those that could not where it
            is negative. Padding repeats one of them.
        sizes_N: 0: every token could.
    """
    possible_NV = (sizes_N <= 0)[:, None].expand(logits_NV.shape).clone()
    possible_NV.scatter_(1, support_NK, (sizes_N >= 0)[:, None].expand(support_NK.shape))
    return logits_NV.masked_fill(~possible_NV, -torch.inf)


def partition(
    logits_NV: Tensor, ids_NK: Tensor, temperatures_N: Tensor, *, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the logprobs of different tokens (N × K), and of all others together (N; −∞ if there are no others).

    The others' logprob is a sum over their logits: 1 − Σ p would be rounding where the K tokens are almost certain.
    """
    if ids_NK.shape[1] == logits_NV.shape[1]:
        chosen_NK = _wide(logits_NV.gather(-1, ids_NK)) / temperatures_N[:, None]
        others_N = chosen_NK.new_full(chosen_NK.shape[:1], -torch.inf)
    else:
        fused = fused and logits_NV.is_cuda and _has_triton()
        chosen_NK, others_N = _Partition.apply(logits_NV, ids_NK, temperatures_N, fused)  # type: ignore[no-untyped-call]
    normalizer_N = torch.logaddexp(torch.logsumexp(chosen_NK, dim=-1), others_N)
    return chosen_NK - normalizer_N[:, None], others_N - normalizer_N


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def logprobs(logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    if logits_NV.is_cuda and _has_triton():
        return logprobs_and_entropies(logits_NV, targets_N, temperatures_N)[0]
    return _chosen(_all_logprobs(logits_NV, temperatures_N), targets_N)


def _all_logprobs(logits_NV: Tensor, temperatures_N: Tensor) -> Tensor:
    return torch.log_softmax(logits_NV.float() / temperatures_N[:, None], dim=-1)


def _chosen(logprobs_NV: Tensor, targets_N: Tensor) -> Tensor:
    return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        from penstock.shared.model import logits_kernel

        chosen_N, entropy_N, normalizer_N = logits_kernel.forward(logits_NV, targets_N, temperatures_N)
        ctx.save_for_backward(logits_NV, targets_N, temperatures_N, normalizer_N, entropy_N)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return chosen_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        from penstock.shared.model import logits_kernel

        return logits_kernel.backward(*ctx.saved_tensors, *gradients), None, None, None


class _Partition(torch.autograd.Function):
    """Scaled logits of K tokens, and log Σ e^x over all others, with one gradient tensor of the logits' size.

    ∂ others / ∂ x_v = e^(x_v − others), and 0 for the K tokens
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, ids_NK: Tensor, temperatures_N: Tensor, fused: bool
    ) -> tuple[Tensor, Tensor]:
        own_NK = logits_NV.gather(-1, ids_NK)
        if fused:
            from penstock.shared.model import logits_kernel

            kept_NV = logits_NV.data  # restored below, so what autograd saved of the logits stays valid
            kept_NV.scatter_(-1, ids_NK, -torch.inf)
            _, _, others_N = logits_kernel.forward(kept_NV, ids_NK[:, 0].contiguous(), temperatures_N)
            kept_NV.scatter_(-1, ids_NK, own_NK)
        else:
            x_NV = _wide(logits_NV) / temperatures_N[:, None]
            others_N = torch.logsumexp(x_NV.scatter_(-1, ids_NK, -torch.inf), dim=-1)
        ctx.save_for_backward(logits_NV, ids_NK, temperatures_N, others_N)
        ctx.fused = fused
        return _wide(own_NK) / temperatures_N[:, None], others_N

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, of_chosen_NK: Tensor, of_others_N: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, ids_NK, temperatures_N, others_N = ctx.saved_tensors
        if ctx.fused:
            from penstock.shared.model import logits_kernel

            zeros_N = torch.zeros_like(others_N)
            of_row = (ids_NK[:, 0].contiguous(), temperatures_N, others_N, zeros_N)
            gradient_NV = logits_kernel.backward(logits_NV, *of_row, -of_others_N, zeros_N)
        else:
            x_NV = _wide(logits_NV) / temperatures_N[:, None]
            x_NV -= others_N.clamp(min=torch.finfo(others_N.dtype).min)[:, None]
            gradient_NV = x_NV.exp_().mul_((of_others_N / temperatures_N)[:, None]).to(logits_NV.dtype)
        # e^(x − others) of the K tokens may be infinite, and is replaced.
        gradient_NV.scatter_(-1, ids_NK, (of_chosen_NK / temperatures_N[:, None]).to(gradient_NV.dtype))
        return gradient_NV, None, None, None
