"""A mixture's experts, each applied to the rows of its tokens at once, as transformers' grouped experts compute.

::

    hidden states ─▶ rows by expert ─▶ product ─▶ gate · router's weights ─▶ product ─▶ sum of each token's rows

The router's weights multiply the gate's output, w · (a W) = (w · a) W, which is narrower than the result, and of which the
backward pass has a copy anyway. So first and last step are each other's gradients, without sorting or atomic sums, and
nothing of the results' size is kept. A product keeps the weight itself, no view: ZeRO stage 3 frees it between passes.

Shapes: ``T`` tokens, ``K`` experts per token, ``S`` pairs of a token and an expert here, ``D`` hidden size, ``I``, ``O``
sizes of a product's rows before and after it, ``E`` experts.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.model.layers.gather import Copies, copies_there, gather_rows, sum_rows


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Rows, by expert."""

    order_S: Tensor
    """Places among the T × K choices."""
    tokens: Copies
    experts: Copies


def groups_of(index_TK: Tensor, experts: int, rows: int) -> Groups:
    """Return the ``rows`` choices of an expert below ``experts``, of all those in ``index_TK``."""
    ordered, order = torch.sort(index_TK.reshape(-1), stable=True)
    ends_E = torch.searchsorted(ordered, torch.arange(experts + 1, device=order.device))
    order_S = order[:rows]
    tokens = copies_there(order_S // index_TK.shape[1], len(index_TK))
    return Groups(order_S, tokens, Copies(ordered[:rows], torch.arange(rows, device=order.device), ends_E))


def compute(module: Any, hidden_TD: Tensor, weights_TK: Tensor, groups: Groups) -> Tensor:
    """Return the weighted sum of the experts' results for each token, by transformers' ``module`` of a layer's experts."""
    rows_SD = gather_rows(hidden_TD, groups.tokens)
    weights_S1 = weights_TK.reshape(-1, 1).index_select(0, groups.order_S)
    count, experts = len(rows_SD), groups.experts
    if not count:  # a row of zeros reaches the weights, whose gradients other ranks wait for
        rows_SD, weights_S1 = (torch.cat([of, of.new_zeros(1, of.shape[1])]) for of in (rows_SD, weights_S1))
        first = torch.zeros_like(experts.ends[:1])
        experts = Copies(first, first, torch.cat([first, torch.ones_like(experts.ends[1:])]))
    gated_SI = module._apply_gate(_product(module, "gate_up_proj", rows_SD, experts))
    out_SD = _product(module, "down_proj", gated_SI * weights_S1, experts, weights_S1)
    return sum_rows(out_SD if count else out_SD[:0], groups.tokens).to(hidden_TD.dtype)


def _product(module: Any, name: str, rows_SI: Tensor, experts: Copies, weights_S1: Tensor | None = None) -> Tensor:
    weight = getattr(module, name)
    out_SO: Tensor = _Product.apply(rows_SI.to(weight.dtype), weight, experts.ends[1:], module.is_transposed)  # type: ignore[no-untyped-call]
    if module.has_bias:
        bias_SO = gather_rows(getattr(module, f"{name}_bias"), experts)
        out_SO = (out_SO + (bias_SO if weights_S1 is None else bias_SO * weights_S1)).to(out_SO.dtype)
    return out_SO


class _Product(torch.autograd.Function):
    """Rows, times their experts' weights [E, O, I], or [E, I, O] if ``transposed``."""

    @staticmethod
    def forward(ctx: Any, rows_SI: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(rows_SI, weight)
        ctx.ends_E, ctx.transposed = ends_E.int(), transposed
        return multiplied(rows_SI, weight if transposed else weight.mT, ctx.ends_E)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient_SO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_SI, weight = ctx.saved_tensors
        gradient_SO, of_rows, of_weight = gradient_SO.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            of_rows = multiplied(gradient_SO, weight.mT if ctx.transposed else weight, ctx.ends_E)
        if ctx.needs_input_grad[1]:
            left, right = (rows_SI, gradient_SO) if ctx.transposed else (gradient_SO, rows_SI)
            of_weight = multiplied(left.mT, right, ctx.ends_E)
        return of_rows, of_weight, None, None


def multiplied(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """Return products of groups: rows S × I by E × I × O (S × O), or I × S by S × O, each group's (E × I × O)."""
    grouped = getattr(nn.functional, "grouped_mm", None)
    if grouped and left.is_cuda and torch.cuda.get_device_capability(left.device) >= (8, 0):
        product: Tensor = grouped(left, right, offs=ends_E)
        return product
    ends = ends_E.tolist()
    spans = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    if right.ndim == 2:
        total = left.new_empty(len(ends), len(left), right.shape[1])
        parts = ((left[:, span], right[span], total[place]) for place, span in enumerate(spans))
    else:
        total = left.new_empty(len(left), right.shape[2])
        parts = ((left[span], right[place], total[span]) for place, span in enumerate(spans))
    for rows, matrix, out in parts:
        torch.mm(rows, matrix, out=out)
    return total
