"""Curriculum (``data.curriculum``): prefer problems whose last groups had signal.

::

    position ──▶ the order's dataset ──▶ a problem of it, drawn by chance
    chance of a problem = UNIFORM / problems of the dataset + (1 − UNIFORM) · signal / sum of the dataset's signals

A problem's *signal* is an average of p(1 − p), the variance of the rewards of its groups (``commit.lua``); without a
group it is the mean of its dataset. The uniform share returns to problems that were never, or always, solved. It is a
share, not a weight, so that these do not fill the draw while the signal of the others shrinks.

The draw is a function of seed, position and signals. Signals change with commits only, and admission reads them with
the version that it admits under, so a rollback repeats the draws of its target.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.services.coordinator.admission.dataset import Dataset
from penstock.services.coordinator.admission.mixing import EpochOrder, MixedOrder
from penstock.shared.bus.stores.experience.signals import UNSEEN
from penstock.shared.errors import SettingsError

UNIFORM = 0.1
"""Share of the draws that ignores signals."""
_MOST_BYTES, _VALUE_BYTES = 8 << 20, 32


class Curriculum:
    """Draws problems of ``dataset`` by signal; ``order`` decides from which of several datasets, and which demonstration.

    Raises:
        SettingsError: the signals would not fit into a checkpoint's description.
    """

    def __init__(self, dataset: Dataset, order: EpochOrder | MixedOrder, seed: int) -> None:
        self._order = order
        self._seed = seed
        drawn = [problem.demonstration is None for problem in dataset.problems]
        self._places: dict[str, list[int]] = {}
        """By problem; equal rows share its signal."""
        for index, problem in enumerate(dataset.problems):
            if drawn[index]:
                self._places.setdefault(problem.row_id, []).append(index)
        self._problems = len(dataset)
        self._ends = np.cumsum(dataset.sizes or (len(dataset),))
        self._is_drawn = [drawn[end - 1] for end in self._ends]
        size = sum(len(row_id) + _VALUE_BYTES for row_id in self._places)
        if size > _MOST_BYTES:
            raise SettingsError(
                f"expected at most {_MOST_BYTES:,} bytes of signals with data.curriculum, which are part of each checkpoint, found "
                f"{size:,} of {len(self._places)} problems: set data.curriculum = false, or data.filter to use fewer"
            )
        self._cumulative = np.zeros(0)
        self.follow({})

    def follow(self, signals: Mapping[str, float]) -> None:
        """Draw by ``signals`` of problems from now on."""
        known = np.full(self._problems, np.nan)
        for name, signal in signals.items():
            known[self._places.get(name, [])] = signal
        parts = [chances(part) for part in np.split(known, self._ends[:-1])]
        self._cumulative = np.concatenate([[0.0], *parts]).cumsum()

    def index(self, position: int) -> int:
        index = self._order.index(position)
        part = int(np.searchsorted(self._ends, index, side="right"))
        if not self._is_drawn[part]:
            return index
        first, end = int(self._ends[part - 1]) if part else 0, int(self._ends[part])
        share = np.random.Generator(np.random.PCG64([self._seed, position, 2])).random()
        low, high = self._cumulative[first], self._cumulative[end]
        drawn = int(np.searchsorted(self._cumulative, low + share * (high - low), side="right")) - 1
        return min(max(drawn, first), end - 1)


def chances(signals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the chance of each problem of a dataset; NaN: it has no group yet.

    Its signal is then the mean of those that have one, and of one more with p = ½.

    >>> chances(np.array([0.2, 0.0])).round(3).tolist()
    [0.95, 0.05]
    """
    seen = ~np.isnan(signals)
    values = np.where(seen, signals, 0.0)
    values[~seen] = (values.sum() + UNSEEN) / (seen.sum() + 1)
    total = values.sum()
    even: npt.NDArray[np.float64] = np.full(len(signals), 1 / len(signals))
    return even if total == 0 else UNIFORM * even + (1 - UNIFORM) * (values / total)
