"""Order of problems: of a dataset, and of several by weight.

::

    cursor ──▶ block, place ──▶ dataset (each has its share of every block) ──▶ its own EpochOrder ──▶ problem
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.shared.errors import SettingsError

BLOCK = 1000
"""Cursors in which every dataset has its share."""


class EpochOrder:
    """Endless order of problems, epoch after epoch.

    ``index(cursor) = permutation(seed, cursor // problems)[cursor % problems]``; without ``shuffle`` the file's order.

    >>> [EpochOrder(3, seed=0, shuffle=False).index(cursor) for cursor in range(5)]
    [0, 1, 2, 0, 1]
    """

    def __init__(self, problems: int, seed: int, *, shuffle: bool) -> None:
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)

    def index(self, cursor: int) -> int:
        epoch, place = divmod(cursor, self._problems)
        return int(self._permutation(epoch)[place]) if self._shuffle else place

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self._problems)


def shares(weights: Sequence[float]) -> list[int]:
    """Return each dataset's part of a block, by largest remainders.

    >>> shares([2, 1])
    [667, 333]
    """
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: BLOCK - sum(parts)]:
        parts[index] += 1
    return parts


class MixedOrder:
    """Endless order over datasets of ``sizes``, whose problems are numbered one dataset after the other."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool) -> None:
        self._shares = shares(weights)
        if 0 in self._shares:
            raise SettingsError(
                f"expected weights of at least 1/{BLOCK} of their sum, found {min(weights):g} of {sum(weights):g}: change data.path"
            )
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._orders = [EpochOrder(size, seed + index, shuffle=shuffle) for index, size in enumerate(sizes)]
        self._seed = seed
        self._shuffle = shuffle
        self._block = functools.lru_cache(maxsize=2)(self._draw)

    def index(self, cursor: int) -> int:
        block, place = divmod(cursor, BLOCK)
        chosen, before = self._block(block)
        dataset = int(chosen[place])
        drawn = block * self._shares[dataset] + int(before[place])
        return self._offsets[dataset] + self._orders[dataset].index(drawn)

    def _draw(self, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the dataset at each place of a block, and how often it was chosen in the block before."""
        spread = sorted(
            ((rank + 0.5) / share, index) for index, share in enumerate(self._shares) for rank in range(share)
        )
        chosen = np.array([index for _, index in spread])
        if self._shuffle:
            chosen = np.random.Generator(np.random.PCG64([self._seed, block, 1])).permutation(chosen)
        before = np.zeros(BLOCK, dtype=np.int64)
        for index in range(len(self._shares)):
            before[chosen == index] = np.arange(self._shares[index])
        return chosen, before
