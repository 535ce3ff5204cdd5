"""Logits in float32 from hidden states and an output layer in half precision.

A product of matrices in bfloat16 is added up in float32 and then rounded to 8 bits: a logit of 20 may be 0.06 off, and logprobs with it
(``benchmarks/logits_precision.py``). Products of two bfloat16 numbers are exact in float32, so a product that keeps what it added up is
that of float32 copies; MiniMax-M1's float32 output layer (arXiv:2506.13585, §3.2) for the price of writing wider logits. On GPUs it is
one matrix product with another output type; elsewhere the factors are copied. Its gradients are products in the layer's own type, as ever.

Shapes: ``N`` tokens, ``D`` hidden size, ``V`` vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shared.errors import SettingsError

LogitsType = Literal["model", "float32"]
"""The model's own type, or float32."""


def projection(output: nn.Module, kind: LogitsType) -> Callable[[Tensor], Tensor]:
    """Return what makes logits (N × V) of hidden states (N × D) as ``output`` does, in the type that ``kind`` says.

    Raises:
        SettingsError: float32 is asked for, and ``output`` is more than a linear layer.
    """
    own: Callable[[Tensor], Tensor] = output.forward
    if kind == "model":
        return own
    if isinstance(output, nn.Linear) and type(output).forward is nn.Linear.forward:
        return functools.partial(_project, output, own)
    raise SettingsError(
        f'expected a plain linear output layer for trainer.logits = "float32", found {type(output).__name__}: '
        'change it to "model"'
    )


def _project(output: nn.Linear, own: Callable[[Tensor], Tensor], hidden_ND: Tensor) -> Tensor:
    if hidden_ND.dtype not in (torch.bfloat16, torch.float16) or output.weight.dtype != hidden_ND.dtype:
        return own(hidden_ND)
    logits_NV: Tensor = _Product.apply(hidden_ND, output.weight)  # type: ignore[no-untyped-call]
    return logits_NV if output.bias is None else logits_NV + output.bias.float()


class _Product(torch.autograd.Function):
    """``hidden @ weight.T`` of half precision, in float32; its gradients are products in half precision, added up in float32."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        if hidden_ND.is_cuda:
            return torch.mm(hidden_ND, weight_VD.t(), out_dtype=torch.float32)
        return hidden_ND.float() @ weight_VD.float().t()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        gradient_NV = gradient_NV.to(weight_VD.dtype)
        of_hidden = gradient_NV @ weight_VD if ctx.needs_input_grad[0] else None
        of_weight = gradient_NV.t() @ hidden_ND if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight
