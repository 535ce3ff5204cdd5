"""Play the episodes of held-out problems with a policy of this process.

::

    problem ──▶ EvaluationEpisodes ──▶ driver ──▶ LocalTurns ── batch by batch, on a thread ──▶ LocalPolicy
"""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.evaluation import EvaluationEpisodes
from penstock.services.episodes.service import Episodes, Policy, driver_of
from penstock.services.offline.generation import ROWS, LocalPolicy
from penstock.shared.bus.messages import PolicyVersion, Prompt, Purpose, RolloutGroup
from penstock.shared.peers.turns import DrawnTurn, TurnRequest
from penstock.shared.settings import Settings

Play = Callable[[Prompt], Awaitable[RolloutGroup]]
"""Plays a problem's episodes. Raises TemporaryError, or PermanentError: they can never be played."""


@contextlib.asynccontextmanager
async def player(settings: Settings, policy: LocalPolicy) -> AsyncIterator[Play]:
    """Yield what plays problems. Raises SettingsError: the environment, tools, agent or chat template cannot be used."""
    turns, hosts = LocalTurns(policy), Hosts(settings.episodes)
    renders, secret = Policy.of(settings, policy.tokenizer), secrets.token_bytes(32)
    drawing = asyncio.create_task(turns.run())
    try:
        await hosts.open()
        async with driver_of(settings, lambda: secret, hosts, renders.context_tokens) as driver:
            episodes = Episodes(settings, renders, turns, driver, "local")
            playing = EvaluationEpisodes(episodes.play, "local", settings.episodes.max_episodes)

            async def play(prompt: Prompt) -> RolloutGroup:
                held_out = dataclasses.replace(
                    prompt,
                    environment=settings.episodes.name,
                    purpose=Purpose.EVALUATE,
                    min_version=policy.version,
                )
                return await playing.handle(held_out)

            yield play
    finally:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        await hosts.close()


class LocalTurns:
    """Draws the turns that are asked for at the same time together; on one event loop."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy
        self._asked: asyncio.Queue[tuple[TurnRequest, asyncio.Future[DrawnTurn]]] = asyncio.Queue()

    @property
    def newest(self) -> PolicyVersion:
        return self._policy.version

    async def draw(self, request: TurnRequest, last: str) -> tuple[DrawnTurn, str]:
        """Draw a turn. Raises what the policy does."""
        answer: asyncio.Future[DrawnTurn] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((request, answer))
        return await answer, last

    async def run(self) -> None:
        """Draw until cancelled."""
        while True:
            asked = [await self._asked.get()]
            while not self._asked.empty() and len(asked) < ROWS:
                asked.append(self._asked.get_nowait())
            asked = [(request, answer) for request, answer in asked if not answer.done()]
            try:
                drawn = await asyncio.to_thread(self._policy.turns, [request for request, _ in asked]) if asked else []
            except Exception as error:  # noqa: BLE001 (whoever asked raises it)
                for _, answer in asked:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), turn in zip(asked, drawn, strict=True):
                if not answer.done():
                    answer.set_result(turn)
