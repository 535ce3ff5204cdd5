"""The checksum as one Triton kernel, for :mod:`penstock.shared.weights.format.checksum` only."""

import torch
import triton
import triton.language as tl

from penstock.shared.weights.format.checksum import COLUMNS, SPREAD

_ROWS = 4
"""Per program: 32 KiB."""


def enqueue(words: torch.Tensor, to: torch.Tensor) -> None:
    """Add the checksum of ``words`` (int64[n]) to ``to`` (int64[]) on the current stream."""
    programs = triton.cdiv(words.numel(), _ROWS * COLUMNS)
    with torch.cuda.device(words.device):
        _add[(programs,)](words, to, words.numel(), SPREAD, COLUMNS, _ROWS)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add(words, to, count, spread, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    place = row[:, None] * COLUMNS + column[None, :]
    word = tl.load(words + place, mask=place < count, other=0)
    a = (column + 1) * spread
    a = (a ^ (a >> 29)) | 1
    b = (row + 1) * spread
    b = (b ^ (b >> 29)) | 1
    total = tl.sum(tl.sum(word * a[None, :], axis=1) * b, axis=0)
    tl.atomic_add(to, total, sem="relaxed")
