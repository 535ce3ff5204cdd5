"""Curriculum (``data.curriculum``): prefer problems whose last groups had signal.

::

    position ──▶ the order's dataset ──▶ a problem of it, drawn by weight          weight = floor + signal

A problem's *signal* is an average of p(1 − p), the variance of the rewards of its groups (``commit.lua``); without a
group it is that of p = ½. The floor gives each problem of a dataset at least 1/21 of its chance in a uniform draw, and
a solved dataset is drawn evenly.

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

FLOOR = UNSEEN / 20
"""Keeps problems in the draw that were always, or never, solved."""
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
        """Draw by ``signals``, by problem, from now on."""
        known = np.full(len(self._places), UNSEEN)
        for source, signal in signals.items():
            if source in self._places:
                known[self._places[source]] = signal
        self._cumulative = np.concatenate([[0.0], weights(known).cumsum()])

    def index(self, position: int) -> int:
        """Return the problem at ``position``."""
        part = int(np.searchsorted(self._ends, self._order.index(position), side="right"))
        first, end = int(self._ends[part - 1]) if part else 0, int(self._ends[part])
        share = np.random.Generator(np.random.PCG64([self._seed, position, 2])).random()
        low, high = self._cumulative[first], self._cumulative[end]
        drawn = int(np.searchsorted(self._cumulative, low + share * (high - low), side="right")) - 1
        return min(max(drawn, first), end - 1)


def weights(signals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the weights of problems in the draw.

    >>> weights(np.array([0.25, 0.0])).tolist()
    [0.2625, 0.0125]
    """
    return FLOOR + signals
