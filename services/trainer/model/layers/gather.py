"""Copies of rows whose gradient is the same on every run, also on a GPU.

A prompt's keys are copied for each of its completions, so their gradients are sums. torch's ``index_select`` makes these sums on a GPU by
atomic additions, in the order in which threads arrive (``torch.use_deterministic_algorithms`` lists it). :class:`Copies` knows each row's
copies in order, so that one kernel adds them up in float32 (:mod:`services.trainer.model.layers.gather_kernel`), in a tenth of the time that sorting the places takes
``index_put_``, which does it for places that are used once. On a CPU ``index_add_`` goes through the copies in order.
"""

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.batch.packing import Int64Array


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Which rows are copied, and where the copies of each row are."""

    places: Tensor
    """The row of each copy."""
    order: Tensor
    """All copies, those of the first row first."""
    ends: Tensor
    """Where each row's copies begin in ``order``, and where the last row's end."""


def copies(places: Int64Array, rows: int, device: torch.device) -> Copies:
    """Return the copies of ``places``, among ``rows`` rows."""
    order = np.argsort(places, kind="stable")
    ends = np.searchsorted(places[order], np.arange(rows + 1))
    return Copies(*(torch.from_numpy(numbers).to(device) for numbers in (places, order, ends)))


def gather_rows(tensor: Tensor, places: Tensor | Copies) -> Tensor:
    """Return ``tensor[places]`` along the first dimension.

    Args:
        tensor: of any shape.
        places: int64, one dimension; a place may come several times.
    """
    known = places if isinstance(places, Copies) else None
    rows: Tensor = _Gather.apply(tensor, places if known is None else known.places, known)  # type: ignore[no-untyped-call]
    return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: Tensor, known: Copies | None) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape, ctx.known = tensor.shape, known
        return tensor.index_select(0, places)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        if ctx.known is not None and gradient.is_cuda and importlib.util.find_spec("triton") is not None:
            from services.trainer.model.layers import gather_kernel

            return gather_kernel.sum_copies(gradient, ctx.known.order, ctx.known.ends, ctx.shape), None, None
        total = gradient.new_zeros(ctx.shape)
        if total.is_cuda:
            return total.index_put_((places,), gradient, accumulate=True), None, None
        return total.index_add_(0, places, gradient), None, None
