"""A scorer that draws 0 or 1 at random: the control of an experiment."""

import hashlib

from penstock.services.reward.scorers.scorer import valued
from penstock.shared.bus.messages import RolloutGroup, Score, ScoreStatus


class Lot:
    """Draw by run seed, scorer, group and sample, so that repeated groups get equal scores."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self._seed = seed

    async def start(self) -> None:
        """Do nothing."""

    async def score(self, group: RolloutGroup) -> list[Score]:
        return [
            valued(self.name, ScoreStatus.OK, self._draw(group.prompt.group_id, index))
            for index in range(len(group.samples))
        ]

    def _draw(self, group_id: int, index: int) -> float:
        digest = hashlib.blake2b(f"{self._seed}/{self.name}/{group_id}/{index}".encode(), digest_size=1).digest()
        return float(digest[0] & 1)

    async def close(self) -> None:
        """Do nothing."""
