"""Normalise a reward model's values to mean 0 and deviation 1 over the run.

    value = (raw − mean) / deviation        over every training sample so far, this group's included (Welford 1962)

A script updates the statistics on the bus, so replicas agree, restarts continue, and each group counts once. With fewer
than two values, or equal ones, values are only shifted.
"""

import math
from collections.abc import Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt, Purpose
from penstock.shared.bus.stores.experience.score_statistics import observe


class Normaliser:
    def __init__(self, bus: Bus, scorer: str) -> None:
        self._bus = bus
        self._scorer = scorer

    async def normalised(self, prompt: Prompt, values: Sequence[float]) -> list[float]:
        counted = values if prompt.purpose is Purpose.TRAIN else ()
        count, mean, squares = await observe(self._bus, self._scorer, prompt.group_id, counted)
        deviation = math.sqrt(squares / count) if count > 1 and squares > 0 else 1.0
        return [(value - mean) / deviation for value in values]
