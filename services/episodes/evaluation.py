"""Evaluate: the episodes of a held-out problem, all of whose turns see one version.

::

    eval_episodes ──▶ Worker ──▶ EvaluationEpisodes.handle ──▶ an episode for each sample ──▶ RolloutGroup ──▶ eval_rollouts
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

from penstock.services.episodes.replicas import Replicas
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt, RolloutGroup, Sample, no_ids
from penstock.shared.bus.stores.policy.evaluations import holding

_LOOK_S = 0.1

Play = Callable[[Prompt], Awaitable[Sample]]
"""Plays the sample that a prompt names. Raises TemporaryError, PermanentError or NotHere."""


class EvaluationEpisodes:
    """The handler of problems; ``most`` episodes at a time."""

    def __init__(self, play: Play, replica: str, most: int) -> None:
        self._play, self._replica = play, replica
        self._room = asyncio.Semaphore(most)

    async def handle(self, prompt: Prompt) -> RolloutGroup:
        """Play a problem's episodes. Raises what the first that cannot be played does."""
        started_at_s = time.time()
        playing = [
            asyncio.create_task(self._one(dataclasses.replace(prompt, sample=place)))
            for place in range(prompt.sampling.samples)
        ]
        try:
            samples = await asyncio.gather(*playing)
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        return RolloutGroup(prompt, no_ids(), tuple(samples), self._replica, started_at_s, time.time())

    async def _one(self, prompt: Prompt) -> Sample:
        async with self._room:
            return await self._play(prompt)


async def watch(bus: Bus, replicas: Replicas, taking: asyncio.Event, evaluating: asyncio.Event) -> None:
    """Set ``evaluating`` while problems can be taken: a replica holds the version under evaluation."""
    while True:
        held = await holding(bus)
        if taking.is_set() and held is not None and replicas.serves(held.version):
            evaluating.set()
        else:
            evaluating.clear()
        await asyncio.sleep(_LOOK_S)
