"""Dead-letter prompts that cannot belong to this run: they would occupy a slot or the engine forever."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion, Prompt, Purpose
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.errors import PermanentError
from penstock.shared.settings import Settings

_TIMES = 64
"""Multiple of the configured group size, which may be raised during the run."""


class Plausibility:
    """Checks prompts of one replica; ``refresh`` returns the current settings."""

    def __init__(self, bus: Bus, settings: Settings, refresh: Callable[[], Awaitable[Settings]]) -> None:
        self._ledger = Ledger(bus)
        self._refresh = refresh
        evaluation = settings.evaluation
        asked = [held_out.samples for held_out in evaluation.held_out]
        self._most_samples = max([_TIMES * settings.sampling.group_size, *asked])
        self._one_read = asyncio.Lock()
        self._cursor = -1
        self._newest = PolicyVersion(-1)

    async def check(self, prompt: Prompt, purpose: Purpose) -> None:
        """Check a prompt from the stream of ``purpose``; raises PermanentError if it is foreign."""
        if prompt.purpose is not purpose:
            raise PermanentError(f"expected a prompt to {purpose} on this stream, found one to {prompt.purpose}")
        if prompt.sampling.samples > self._most_samples:
            await self._check_samples(prompt.sampling.samples)
        training = purpose is Purpose.TRAIN
        if self._is_news(prompt, training=training):
            async with self._one_read:  # serves all prompts that arrived with this one
                if self._is_news(prompt, training=training):
                    await self._check_run(prompt, training=training)

    def _is_news(self, prompt: Prompt, *, training: bool) -> bool:
        return prompt.min_version > self._newest or (training and prompt.group_id >= self._cursor)

    async def _check_samples(self, samples: int) -> None:
        most = max(self._most_samples, (await self._refresh()).sampling.group_size)
        if samples > most:
            raise PermanentError(
                f"expected at most {most} samples of a prompt, found {samples}: {_TIMES} × sampling.group_size of the run's "
                "file, or evaluation.samples, is the limit"
            )

    async def _check_run(self, prompt: Prompt, *, training: bool) -> None:
        """Compare with the run's progress; a bus that restarted empty proves nothing."""
        extent = await self._ledger.extent()
        if training and extent.cursor is not None:
            self._cursor = extent.cursor
            if prompt.group_id >= self._cursor:
                raise PermanentError(f"group {prompt.group_id} was not admitted: only the first {self._cursor} were")
        if extent.newest_version is not None:
            self._newest = extent.newest_version
            if prompt.min_version > self._newest:
                raise PermanentError(
                    f"the prompt waits for version {prompt.min_version}, but the newest is {self._newest}"
                )
