"""The reward that an environment or an agent gave to an episode, which travels with its sample."""

from penstock.services.reward.scorers.scorer import unavailable, valued
from penstock.shared.bus.messages import RolloutGroup, Sample, Score, ScoreStatus


class EnvironmentReward:
    def __init__(self, name: str) -> None:
        self.name = name

    async def start(self) -> None:
        """Do nothing."""

    async def score(self, group: RolloutGroup) -> list[Score]:
        return [self._score(sample) for sample in group.samples]

    def _score(self, sample: Sample) -> Score:
        if sample.environment_reward is None:
            return unavailable(self.name, "its environment, or agent, gave no reward")
        return valued(self.name, ScoreStatus.OK, sample.environment_reward, sample.ended.value)

    async def close(self) -> None:
        """Do nothing."""
