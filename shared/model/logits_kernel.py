"""Triton kernels for :mod:`penstock.shared.model.logits` only.

A forward program handles a row, as one online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867), a backward program
a block of a row::

    m = max x,  s = Σ e^(x − m),  u = Σ e^(x − m) (x − m)          log Σ e^x = m + log s,  entropy = log s − u / s
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


def forward(logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs, entropies, and log Σ e^x, each float32[N]."""
    logits_NV = logits_NV.contiguous()
    rows, width = logits_NV.shape
    outputs = [torch.empty(rows, dtype=torch.float32, device=logits_NV.device) for _ in range(3)]
    with torch.cuda.device(logits_NV.device):
        _forward[(rows,)](logits_NV, targets_N, temperatures_N, *outputs, width, _BLOCK, num_warps=_WARPS)
    return outputs[0], outputs[1], outputs[2]


def backward(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    normalizer_N: Tensor,
    entropy_N: Tensor,
    chosen_gradient_N: Tensor,
    entropy_gradient_N: Tensor,
) -> Tensor:
    logits_NV = logits_NV.contiguous()
    rows, width = logits_NV.shape
    gradient_NV = torch.empty_like(logits_NV)
    of_row = (targets_N, temperatures_N, normalizer_N, entropy_N)
    gradients = (chosen_gradient_N.contiguous(), entropy_gradient_N.contiguous())
    with torch.cuda.device(logits_NV.device):
        programs = (rows, triton.cdiv(width, _BLOCK))
        _backward[programs](logits_NV, gradient_NV, *of_row, *gradients, width, _BLOCK, num_warps=_WARPS)
    return gradient_NV


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward(logits, targets, temperatures, chosen, entropies, normalizers, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0 / tl.load(temperatures + row)
    largest = -1e30  # finite, to avoid ∞ − ∞
    total = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * width + place, mask=place < width, other=float("-inf")).to(tl.float32)
        x = logit * scale
        larger = tl.maximum(largest, tl.max(x, axis=0))
        shrink = tl.exp(largest - larger)
        e = tl.exp(x - larger)
        weighted = shrink * (weighted + (largest - larger) * total) + tl.sum(tl.where(e == 0.0, 0.0, e * (x - larger)))
        total = shrink * total + tl.sum(e)
        largest = larger
    normalizer = largest + tl.log(total)
    target = tl.load(targets + row)
    tl.store(chosen + row, tl.load(logits + row * width + target).to(tl.float32) * scale - normalizer)
    tl.store(entropies + row, tl.log(total) - weighted / total)
    tl.store(normalizers + row, normalizer)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(  # type: ignore[no-untyped-def]
    logits,
    to,
    targets,
    temperatures,
    normalizers,
    entropies,
    chosen_gradients,
    entropy_gradients,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = 1.0 / tl.load(temperatures + row)
    of_chosen, of_entropy = tl.load(chosen_gradients + row), tl.load(entropy_gradients + row)
    logit = tl.load(logits + row * width + place, mask=place < width, other=float("-inf")).to(tl.float32)
    logprob = logit * scale - tl.load(normalizers + row)
    p = tl.exp(logprob)
    is_target = tl.where(place == tl.load(targets + row), 1.0, 0.0)
    of_x = of_chosen * (is_target - p)
    of_x -= of_entropy * tl.where(p == 0.0, 0.0, p * (logprob + tl.load(entropies + row)))
    tl.store(to + row * width + place, (of_x * scale).to(to.dtype.element_ty), mask=place < width)
