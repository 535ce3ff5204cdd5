"""Bring a reward model's values to mean 0 and deviation 1, by what all replicas have seen of the run.

    value = (raw − mean) / deviation        over every training sample so far, this group's included (Welford 1962)

Count, mean and sum of squared differences lie in one hash on the bus and change in one script, so replicas agree, a restart
goes on, and a group that is scored again counts once. Evaluations are normalised and not counted. With fewer than two values,
or where all are equal, values are only shifted.
"""

import math
from collections.abc import Sequence

from shared.bus.bus import Bus
from shared.bus.messages import Prompt, Purpose
from shared.bus.stores.score_statistics import observe


class Normaliser:
    """The running normalisation of one scorer."""

    def __init__(self, bus: Bus, scorer: str) -> None:
        self._bus = bus
        self._scorer = scorer

    async def normalised(self, prompt: Prompt, values: Sequence[float]) -> list[float]:
        """Return the values of one group, normalised; count them if it is one of training that was not counted."""
        counted = values if prompt.purpose is Purpose.TRAIN else ()
        count, mean, squares = await observe(self._bus, self._scorer, prompt.group_id, counted)
        deviation = math.sqrt(squares / count) if count > 1 and squares > 0 else 1.0
        return [(value - mean) / deviation for value in values]
