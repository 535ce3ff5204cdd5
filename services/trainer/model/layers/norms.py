"""Transformers' plain RMS norm, by one kernel (``triton_kernels.norm``)."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

_NARROWEST, _WIDEST = 257, 16_384
"""Liger handles narrower ones in blocks."""


def replace(model: nn.Module) -> None:
    for module in model.modules():
        if _is_plain(module):
            module.__dict__["forward"] = functools.partial(_normalize, module)


def _is_plain(module: Any) -> bool:
    own = str(getattr(module.__dict__.get("forward"), "__module__", ""))
    plain = own.startswith("liger_kernel") and getattr(module, "casting_mode", "") == "llama" and module.offset == 0.0
    if not plain or module.weight is None:
        return False
    return _NARROWEST <= int(getattr(module.weight, "ds_numel", module.weight.numel())) <= _WIDEST


def _normalize(module: Any, hidden: Tensor) -> Tensor:
    return rms_norm(hidden, module.weight, module.variance_epsilon)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(hidden, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        from penstock.services.trainer.model.layers.triton_kernels import norm as norm_kernel

        flat_TD = hidden.contiguous().view(-1, hidden.shape[-1])
        y_TD, inverse_T = norm_kernel.forward(flat_TD, weight, epsilon)
        ctx.save_for_backward(flat_TD, weight, inverse_T)
        return y_TD.view(hidden.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        from penstock.services.trainer.model.layers.triton_kernels import norm as norm_kernel

        flat_TD, weight, inverse_T = ctx.saved_tensors
        flat_gradient = gradient.contiguous().view(flat_TD.shape)
        of_x_TD, of_weight = norm_kernel.backward(flat_gradient, flat_TD, weight, inverse_T)
        return of_x_TD.view(gradient.shape), of_weight, None
