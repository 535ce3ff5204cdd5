"""The bytes that strided views touch: interval arithmetic without tensors.

Shape (3, 4), strides (10, 1), two-byte numbers, at byte 100::

    intervals(100, (3, 4), (10, 1), 2)    [[100, 108], [120, 128], [140, 148]]
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Intervals: TypeAlias = npt.NDArray[np.int64]
"""int64, N × 2: rows of (first byte, byte after the last)."""


class TouchedTwice(Exception):
    """Byte number ``byte`` is covered twice."""

    def __init__(self, byte: int) -> None:
        super().__init__(f"byte {byte} is touched twice")
        self.byte = byte


def intervals(offset: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> Intervals:
    """Return a view's byte runs: ``offset`` in bytes, ``strides`` in items."""
    if 0 in shape:
        return np.empty((0, 2), dtype=np.int64)
    run, starts = item_bytes, np.array([offset], dtype=np.int64)
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride * item_bytes == run and len(starts) == 1:
            run *= size
        else:
            starts = (np.arange(size, dtype=np.int64)[:, None] * (stride * item_bytes) + starts[None, :]).ravel()
    return np.stack([starts, starts + run], axis=1)


def union(parts: Sequence[Intervals]) -> Intervals:
    """Return sorted intervals, adjacent ones joined; raises TouchedTwice on overlap."""
    if not parts:
        return np.empty((0, 2), dtype=np.int64)
    joined = np.concatenate(parts)
    joined = joined[np.argsort(joined[:, 0], kind="stable")]
    overlaps = np.flatnonzero(joined[1:, 0] < joined[:-1, 1])
    if len(overlaps):
        raise TouchedTwice(int(joined[overlaps[0] + 1, 0]))
    breaks = np.flatnonzero(joined[1:, 0] > joined[:-1, 1])
    first, last = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(joined) - 1]])
    return np.stack([joined[first, 0], joined[last, 1]], axis=1) if len(joined) else joined


def merged(parts: Sequence[Intervals]) -> Intervals:
    joined = np.concatenate([np.empty((0, 2), dtype=np.int64), *parts])
    joined = joined[np.argsort(joined[:, 0], kind="stable")]
    reach = np.maximum.accumulate(joined[:, 1])
    first = np.flatnonzero(np.concatenate([[True], joined[1:, 0] > reach[:-1]])[: len(joined)])
    return np.stack([joined[first, 0], reach[np.concatenate([first[1:] - 1, [len(joined) - 1]])[: len(first)]]], axis=1)


def first_missing(covered: Intervals, needed: Intervals) -> int | None:
    """Return the lowest byte of ``needed`` missing from ``covered`` (a union), or None."""
    if not len(needed):
        return None
    needed = needed[np.argsort(needed[:, 0], kind="stable")]
    if not len(covered):
        return int(needed[0, 0])
    places = np.searchsorted(covered[:, 0], needed[:, 0], side="right") - 1
    held = np.where(places >= 0, covered[np.maximum(places, 0), 1], 0)
    missing = np.flatnonzero(held < needed[:, 1])
    return None if not len(missing) else int(max(needed[missing[0], 0], held[missing[0]]))
