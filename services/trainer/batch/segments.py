"""Segments of packed rows: trees of consecutive tokens in depth-first order.

A token attends to those before it in its segment and in the segment's ancestors. So one number per token describes the
tree: key k is visible to query q exactly if ``k <= q < until[k]``, where ``until`` is the end of the subtree of k's
segment::

    segments    0 0 | 1 1 | 2 2 | 3 | 4 4        parents −1, 0, 1, 1, 0: a prompt and its completions 1 and 4, of which
    until       9 9   7 7   6 6   7   9 9        1 has two continuations
    position    0 1   2 3   4 5   4   2 3

``T`` tokens, ``K`` segments.
"""

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Segments:
    """Consecutive segments that cover the row."""

    starts_K: Int64Array
    lengths_K: Int64Array
    parents_K: Int64Array
    """The segment that a segment continues; −1: none."""

    @functools.cached_property
    def before(self) -> Int64Array:
        """Tokens of a segment's ancestors."""
        before, lengths = [0] * len(self.starts_K), self.lengths_K.tolist()
        for k, parent in enumerate(self.parents_K.tolist()):
            if parent >= 0:
                before[k] = before[parent] + lengths[parent]
        return np.array(before, dtype=np.int64)

    @functools.cached_property
    def ends(self) -> Int64Array:
        ends = (self.starts_K + self.lengths_K).tolist()
        for k, parent in reversed(list(enumerate(self.parents_K.tolist()))):
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[k])
        return np.array(ends, dtype=np.int64)

    @functools.cached_property
    def roots(self) -> Int64Array:
        """The first of a segment's ancestors, or itself."""
        roots = list(range(len(self.starts_K)))
        for k, parent in enumerate(self.parents_K.tolist()):
            if parent >= 0:
                roots[k] = roots[parent]
        return np.array(roots, dtype=np.int64)

    @property
    def until(self) -> Int64Array:
        return np.repeat(self.ends, self.lengths_K)

    @property
    def positions(self) -> Int64Array:
        """Each token's position in its sequence."""
        offsets_T = np.repeat(self.before - self.starts_K, self.lengths_K)
        return np.arange(len(offsets_T)) + offsets_T

    def path(self, k: int) -> list[int]:
        """Return a segment with its ancestors, the first of them first."""
        path, parents_K = [k], self.parents_K
        while (parent := int(parents_K[path[-1]])) >= 0:
            path.append(parent)
        return path[::-1]

    @functools.cached_property
    def paths(self) -> list[list[int]]:
        """The paths to all segments that nothing continues."""
        continued = set(self.parents_K.tolist())
        return [self.path(k) for k in range(len(self.starts_K)) if k not in continued]

    def places(self, path: list[int]) -> Int64Array:
        """Return the places of a path's tokens in the row."""
        starts, lengths = self.starts_K[path].tolist(), self.lengths_K[path].tolist()
        return np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])


def join(rows: list[Segments]) -> Segments:
    """Return the segments of consecutive rows; a token without rows."""
    tokens = segments = 0
    joined: list[tuple[Int64Array, Int64Array, Int64Array]] = []
    for row in rows:
        joined.append((row.starts_K + tokens, row.lengths_K, np.where(row.parents_K < 0, -1, row.parents_K + segments)))
        tokens += int(row.lengths_K.sum())
        segments += len(row.starts_K)
    if not tokens:
        joined = [(np.zeros(1, np.int64), np.ones(1, np.int64), np.full(1, -1, np.int64))]
    return Segments(*(np.concatenate(parts) for parts in zip(*joined, strict=True)))
