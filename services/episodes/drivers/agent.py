"""Let an agent of the user's own play an episode, which asks the policy over HTTP."""

from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.drivers.loop import row_of
from penstock.services.episodes.episode import Episode
from penstock.services.episodes.http.gateway import Gateway
from penstock.shared.bus.messages import Ended
from penstock.shared.settings.rollout import EpisodesSettings


class AgentPlayer:
    """Plays episodes; ``answer_field`` is the column of a row's reference answer."""

    def __init__(self, settings: EpisodesSettings, hosts: Hosts, gateway: Gateway, answer_field: str) -> None:
        self._settings, self._hosts, self._gateway, self._answer_field = settings, hosts, gateway, answer_field

    async def play(self, episode: Episode) -> float | None:
        """Play it to its end; return the agent's reward, if it gave one. Raises TemporaryError: the agent failed."""
        prompt, over = episode.prompt, episode.ended
        row = row_of(prompt, self._answer_field)
        async with self._hosts.place((prompt.group_id, prompt.sample)) as (host, slot):
            with self._gateway.visited(episode) as key:
                given = {"task": row["prompt"], "base_url": f"{self._gateway.url}/v1", "api_key": key, "row": row}
                said = await host.ask(slot, "run", self._settings.deadline_s, "deadline_s", **given)
        if episode.ended is over:
            episode.ended = Ended.AGENT
        reward: float | None = said["value"]
        return reward
