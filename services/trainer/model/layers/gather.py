"""Copies of rows whose gradient is the same on every run, also on a GPU.

A prompt's keys are copied for each of its completions, so their gradients are sums. torch's ``index_select`` makes these sums on a GPU by
atomic additions, in the order in which threads arrive (``torch.use_deterministic_algorithms`` lists it); ``index_put_`` with
``accumulate`` sorts the places first and adds the copies of each in order. On a CPU ``index_add_`` goes through the copies in order.
"""

from typing import Any

import torch
from torch import Tensor


def gather_rows(tensor: Tensor, places: Tensor) -> Tensor:
    """Return ``tensor[places]`` along the first dimension.

    Args:
        tensor: of any shape.
        places: int64, one dimension; a place may come several times.
    """
    rows: Tensor = _Gather.apply(tensor, places)  # type: ignore[no-untyped-call]
    return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = tensor.shape
        return tensor.index_select(0, places)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape)
        if total.is_cuda:
            return total.index_put_((places,), gradient, accumulate=True), None
        return total.index_add_(0, places, gradient), None
