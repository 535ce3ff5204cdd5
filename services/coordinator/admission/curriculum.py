"""Curriculum (``data.curriculum``): prefer problems whose last groups had signal.

::

    position ──▶ one of EVERY ──▶ the order's next problem
             └─▶ the others ────▶ the order's next dataset ──▶ a problem of it, drawn by signal

A problem's *signal* is an average of p(1 − p), the variance of the rewards of its groups (``commit.lua``); a problem
without a group counts as the mean of its dataset's others. The order's positions visit every problem once in ``EVERY``
epochs, whatever the signals: problems that were never solved, and solved ones, which training on others may unlearn.

The draw is a function of seed, position and signals. Signals change with commits only, and admission reads them with
the version that it admits under, so a rollback repeats the draws of its target.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from services.coordinator.admission.dataset import Dataset, EpochOrder
from services.coordinator.admission.mixing import MixedOrder
from shared.bus.stores.experience.signals import UNSEEN
from shared.errors import SettingsError

EVERY = 4
"""Of as many positions, one is the order's."""
_MOST_BYTES, _VALUE_BYTES = 8 << 20, 32


class Curriculum:
    """Draws problems of ``dataset`` by signal; ``order`` decides from which of several datasets.

    Raises:
        SettingsError: the signals would not fit into a checkpoint's description.
    """

    def __init__(self, dataset: Dataset, order: EpochOrder | MixedOrder, seed: int) -> None:
        self._order = order
        self._seed = seed
        self._places = {problem.source: index for index, problem in enumerate(dataset.problems)}
        self._ends = np.cumsum(dataset.sizes or (len(dataset),))
        size = sum(len(source) + _VALUE_BYTES for source in self._places)
        if size > _MOST_BYTES:
            raise SettingsError(
                f"expected at most {_MOST_BYTES:,} bytes of signals with data.curriculum, which are part of each checkpoint, found "
                f"{size:,} of {len(dataset)} problems: set data.curriculum = false, or data.filter to use fewer"
            )
        self._cumulative = np.zeros(0)
        self.follow({})

    def follow(self, signals: Mapping[str, float]) -> None:
        """Draw by ``signals`` of problems from now on."""
        known = np.full(len(self._places), np.nan)
        for source, signal in signals.items():
            if source in self._places:
                known[self._places[source]] = signal
        parts = [chances(part) for part in np.split(known, self._ends[:-1])]
        self._cumulative = np.concatenate([[0.0], np.concatenate(parts).cumsum()])

    def index(self, position: int) -> int:
        """Return the problem at ``position``."""
        place, turn = divmod(position, EVERY)
        if turn == 0:
            return self._order.index(place)
        part = int(np.searchsorted(self._ends, self._order.index(position - place - 1), side="right"))
        first, end = int(self._ends[part - 1]) if part else 0, int(self._ends[part])
        share = np.random.Generator(np.random.PCG64([self._seed, position, 2])).random()
        low, high = self._cumulative[first], self._cumulative[end]
        drawn = int(np.searchsorted(self._cumulative, low + share * (high - low), side="right")) - 1
        return min(max(drawn, first), end - 1)


def chances(signals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the chance of each problem of a dataset in a draw by signal; NaN: it has no group yet.

    >>> chances(np.array([0.15, 0.1, 0.0, 0.0])).tolist()
    [0.6, 0.4, 0.0, 0.0]
    """
    seen = ~np.isnan(signals)
    weights = np.where(seen, signals, 0.0)
    weights[~seen] = (weights.sum() + UNSEEN) / (seen.sum() + 1)  # as if one more had p = ½
    total = weights.sum()
    return np.full(len(signals), 1 / len(signals)) if total == 0 else weights / total
