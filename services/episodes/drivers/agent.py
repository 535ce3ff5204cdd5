"""Let an agent of the user's own play an episode, which asks the policy over HTTP: a function, or a server."""

from collections.abc import Mapping
from typing import Any, Protocol

from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.drivers.loop import row_of
from penstock.services.episodes.episode import Episode
from penstock.services.episodes.http.gateway import Gateway
from penstock.shared.bus.messages import Ended
from penstock.shared.settings.rollout import EpisodesSettings


class Agent(Protocol):
    async def run(self, episode: Episode, given: Mapping[str, Any]) -> float | None:
        """Return the reward of an episode, None without. Raises TemporaryError: the agent failed."""


class AgentFunction:
    """A function of the user's, in a process of its own."""

    def __init__(self, settings: EpisodesSettings, hosts: Hosts) -> None:
        self._deadline_s, self._hosts = settings.deadline_s, hosts

    async def run(self, episode: Episode, given: Mapping[str, Any]) -> float | None:
        prompt = episode.prompt
        async with self._hosts.place((prompt.group_id, prompt.sample)) as (host, slot):
            reward: float | None = (await host.ask(slot, "run", self._deadline_s, "deadline_s", **given))["value"]
        return reward


class AgentPlayer:
    """Plays episodes; ``answer_field`` is the column of a row's reference answer."""

    def __init__(self, agent: Agent, gateway: Gateway, answer_field: str) -> None:
        self._agent, self._gateway, self._answer_field = agent, gateway, answer_field

    async def play(self, episode: Episode) -> float | None:
        """Play it to its end; return the agent's reward, if it gave one. Raises TemporaryError: the agent failed."""
        over, row = episode.ended, row_of(episode.prompt, self._answer_field)
        with self._gateway.visited(episode) as key:
            given = {"task": row["prompt"], "base_url": f"{self._gateway.url}/v1", "api_key": key, "row": row}
            reward = await self._agent.run(episode, given)
        if episode.ended is over:
            episode.ended = Ended.AGENT
        return reward
