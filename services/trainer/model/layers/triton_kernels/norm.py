"""RMS norm as Triton kernels.

    n = x / √(mean x² + ε), rounded;  y = w · n          ∂x = (∂n − n · mean(∂n · n)) / √(…),  ∂w = Σ ∂y · n

One program per row forward; ``_PROGRAMS`` share the rows backward, to limit the partial sums of ∂w.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1056
"""Eight per multiprocessor of an H100, to hide memory latency."""


def forward(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the inverse root of each row (float32)."""
    rows, width = x_TD.shape
    y_TD, inverse_T = torch.empty_like(x_TD), torch.empty(rows, dtype=torch.float32, device=x_TD.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device(x_TD.device):
        _forward[(rows,)](x_TD, weight_D, y_TD, inverse_T, width, epsilon, block, num_warps=_warps(block))
    return y_TD, inverse_T


def backward(gradient_TD: Tensor, x_TD: Tensor, weight_D: Tensor, inverse_T: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x_TD.shape
    programs, block = min(rows, _PROGRAMS), triton.next_power_of_2(width)
    of_x_TD = torch.empty_like(x_TD)
    of_weight_PD = torch.empty(programs, width, dtype=torch.float32, device=x_TD.device)
    tensors = (gradient_TD, x_TD, weight_D, inverse_T, of_x_TD, of_weight_PD)
    with torch.cuda.device(x_TD.device):
        _backward[(programs,)](*tensors, rows, width, triton.cdiv(rows, programs), block, num_warps=_warps(block))
    return of_x_TD, of_weight_PD.sum(0).to(weight_D.dtype)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward(x, weight, y, inverse, width, epsilon, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    given = tl.load(x + row * width + place, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    root = 1.0 / tl.sqrt(tl.sum(wide * wide) / width + epsilon)
    normal = (wide * root).to(given.dtype)
    tl.store(y + row * width + place, normal * tl.load(weight + place, mask=inside, other=0.0), mask=inside)
    tl.store(inverse + row, root)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(gradient, x, weight, inverse, of_x, of_weight, rows, width, each, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    factor = tl.load(weight + place, mask=inside, other=0.0)
    added = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program * each, tl.minimum(program * each + each, rows)):
        given = tl.load(x + row * width + place, mask=inside, other=0.0)
        arriving = tl.load(gradient + row * width + place, mask=inside, other=0.0)
        root = tl.load(inverse + row)
        normal = given.to(tl.float32) * root
        added += arriving.to(tl.float32) * normal.to(given.dtype).to(tl.float32)
        of_normal = (arriving * factor).to(tl.float32)
        of_row = root * (of_normal - normal * (tl.sum(of_normal * normal) / width))
        tl.store(of_x + row * width + place, of_row.to(given.dtype), mask=inside)
    tl.store(of_weight + program * width + place, added, mask=inside)
