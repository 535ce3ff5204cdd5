"""Triton kernel that sums the copies of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_BLOCK = 1024


def sum_copies(copies: Tensor, order: Tensor, ends: Tensor, shape: torch.Size) -> Tensor:
    """Return, for each row of ``shape``, the sum of its copies, added in float32 in order."""
    total = torch.empty(shape, dtype=copies.dtype, device=copies.device)
    if total.numel() == 0:
        return total
    width = total[0].numel()
    block = min(_MOST_BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device(copies.device):
        programs = (len(total), triton.cdiv(width, block))
        _sum[programs](copies.contiguous(), order, ends, total, width, block, num_warps=max(1, block // 256))
    return total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum(copies, order, ends, total, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    added = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(tl.load(ends + row), tl.load(ends + row + 1)):
        copy = tl.load(order + number)
        added += tl.load(copies + copy * width + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * width + place, added.to(total.dtype.element_ty), mask=inside)
