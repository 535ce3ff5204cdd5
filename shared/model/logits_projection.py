"""Float32 logits from half-precision hidden states and output layer (docs/algorithms.md, "Numerics").

One product on GPUs, copied factors elsewhere; gradients are half-precision products. Shapes: ``N`` tokens, ``D`` hidden
size, ``V`` vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.shared.errors import SettingsError

LogitsType = Literal["model", "float32"]


def projection(output: nn.Module, kind: LogitsType) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states (N × D) to logits (N × V) in type ``kind``.

    Raises SettingsError for float32 unless ``output`` is a plain linear layer.
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
    """``hidden @ weight.T`` in float32, with half-precision gradients."""

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
