"""Bucket checksums in one memory read, equal on CPU and CUDA.

The bytes are 64-bit words x in a matrix of ``COLUMNS`` columns (the last row is zero-padded)::

    checksum = Σ_r b_r · Σ_c a_c · x_rc   mod 2^64          a, b: fixed odd numbers, one of each column and row

A single changed word is always detected (odd factors are invertible); swaps or partial updates are missed with
probability 2^-64. Not a signature. One enqueued kernel on GPUs, to limit GIL contention.
"""

import functools
from collections.abc import Callable

import torch

COLUMNS = 1024
SPREAD = -7046029254386353131
"""Golden ratio in 64 bits; its multiples are well spread."""
_CHUNK_ROWS = 512
"""Rows per CPU sum, for the cache."""


def checksum(bucket: torch.Tensor) -> torch.Tensor:
    """Return the checksum (int64[], same device) of ``bucket`` (uint8[n], n a multiple of 256); does not wait."""
    total = torch.zeros((), dtype=torch.int64, device=bucket.device)
    add_checksum(bucket, total)
    return total


def add_checksum(bucket: torch.Tensor, to: torch.Tensor) -> None:
    words = bucket.view(torch.int64)
    if (enqueue := _kernel()) is not None and bucket.is_cuda:
        enqueue(words, to)
    else:
        to += _sum(words)


def text(value: torch.Tensor) -> str:
    """Return a checksum as hex; waits for the device."""
    return int(value).to_bytes(8, "little", signed=True).hex()


@functools.cache
def _kernel() -> "Callable[[torch.Tensor, torch.Tensor], None] | None":
    if not torch.cuda.is_available():
        return None
    try:
        from penstock.shared.weights.format.checksum_kernel import enqueue
    except ImportError:
        return None
    return enqueue


def _sum(words: torch.Tensor) -> torch.Tensor:
    columns = _weights(COLUMNS, words.device)
    rows = -(-words.numel() // COLUMNS)
    row_sums = torch.zeros(rows, dtype=torch.int64, device=words.device)
    whole = words.numel() // COLUMNS
    matrix = words[: whole * COLUMNS].view(whole, COLUMNS)
    for start in range(0, whole, _CHUNK_ROWS):
        torch.sum(
            matrix[start : start + _CHUNK_ROWS] * columns, 1, out=row_sums[start : min(start + _CHUNK_ROWS, whole)]
        )
    if whole < rows:
        tail = words[whole * COLUMNS :]
        row_sums[whole] = (tail * columns[: tail.numel()]).sum()
    return (row_sums * _weights(rows, words.device)).sum()


@functools.lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    weights = torch.arange(1, 1 + count, dtype=torch.int64, device=device) * SPREAD
    weights ^= weights >> 29
    return weights | 1
