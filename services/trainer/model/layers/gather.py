"""Copies of rows and sums of copies, each the gradient of the other, deterministic also on a GPU.

A prompt's keys are copied for each completion, a token's hidden state for each of its experts. torch's ``index_select``
sums gradients atomically, in any order; one kernel (``triton_kernels.gather``) sums them in order and float32, in a tenth
of the time of ``index_put_``.
"""

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.services.trainer.batch.segments import Int64Array


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    places: Tensor
    order: Tensor
    """All copies, by row."""
    ends: Tensor
    """Bounds of each row in ``order``."""


def copies(places: Int64Array, rows: int, device: torch.device) -> Copies:
    order = np.argsort(places, kind="stable")
    ends = np.searchsorted(places[order], np.arange(rows + 1))
    return Copies(*(torch.from_numpy(numbers).to(device) for numbers in (places, order, ends)))


def copies_there(places: Tensor, rows: int) -> Copies:
    """Return :func:`copies` of places that only their device knows, without waiting for it."""
    ordered, order = torch.sort(places, stable=True)
    return Copies(places, order, torch.searchsorted(ordered, torch.arange(rows + 1, device=places.device)))


def gather_rows(tensor: Tensor, places: Tensor | Copies) -> Tensor:
    """Return ``tensor[places]`` along the first dimension; places (int64) may repeat."""
    known = places if isinstance(places, Copies) else None
    rows: Tensor = _Gather.apply(tensor, places if known is None else known.places, known)  # type: ignore[no-untyped-call]
    return rows


def sum_rows(rows: Tensor, known: Copies) -> Tensor:
    """Return the sum of each row's copies."""
    total: Tensor = _Sum.apply(rows, known)  # type: ignore[no-untyped-call]
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor, known: Copies | None) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape, ctx.known = tensor.shape, known
        return tensor.index_select(0, places)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.known is not None:
            return _summed(gradient, ctx.known, ctx.shape), None, None
        (places,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape)
        if total.is_cuda:
            return total.index_put_((places,), gradient, accumulate=True), None, None
        return total.index_add_(0, places, gradient), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, known: Copies) -> Tensor:
        ctx.places = known.places
        return _summed(rows, known, torch.Size((len(known.ends) - 1, *rows.shape[1:])))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.places), None


def _summed(rows: Tensor, known: Copies, shape: torch.Size) -> Tensor:
    if rows.is_cuda and importlib.util.find_spec("triton") is not None:
        from penstock.services.trainer.model.layers.triton_kernels import gather as gather_kernel

        return gather_kernel.sum_copies(rows, known.order, known.ends, shape)
    total = nn.functional.embedding_bag(known.order, rows.flatten(1), known.ends, mode="sum", include_last_offset=True)
    return total.view(shape)
