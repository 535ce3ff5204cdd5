"""Reference logprobs of a group under the frozen initial policy (``frozen_policy``).

They travel with the group (``Experience.reference_logprobs``), so no trainer rank holds the initial policy.
"""

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from services.reward.models.batcher import Batcher, NoRoom
from services.reward.scorers.reward_model import require_libraries
from shared.bus.messages import Float32Array, RolloutGroup
from shared.errors import TemporaryError
from shared.model.model_source import check_model
from shared.process.importing import importing
from shared.process.memory_timeline import Held
from shared.settings import Settings

if TYPE_CHECKING:
    from services.reward.models.frozen_policy import FrozenPolicy, TokenSequence


class Reference:
    """The frozen initial policy of a run. Raises SettingsError."""

    name = "reference"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        require_libraries('algorithm.reference = "reward"')
        check_model("policy.model", settings.policy.model)
        self._policy: FrozenPolicy | None = None
        self._batcher: Batcher[TokenSequence, Float32Array] | None = None

    async def start(self) -> None:
        """Load the model in a thread. Raises SettingsError."""
        self._policy = await asyncio.to_thread(_open, self._settings)
        self._batcher = Batcher(self._policy, self._settings.model_work, self.name)
        self._batcher.start()

    @property
    def held(self) -> Held | None:
        """What the policy holds on its device, once it is loaded."""
        return None if self._policy is None else self._policy.held

    async def close(self) -> None:
        """Stop."""
        if self._batcher is not None:
            await self._batcher.close()

    async def logprobs(self, group: RolloutGroup) -> Float32Array:
        """Return the logprobs of all samples' tokens, concatenated (nats). Raises TemporaryError."""
        from services.reward.models.frozen_policy import TokenSequence

        assert self._batcher is not None
        temperature = group.prompt.sampling.temperature
        sequences = [TokenSequence(group.prompt_token_ids, sample.token_ids, temperature) for sample in group.samples]
        try:
            logprobs = await self._batcher.run(sequences)
        except NoRoom as error:
            raise TemporaryError(f"reference unavailable: {error}") from error
        return np.concatenate(logprobs)


def _open(settings: Settings) -> "FrozenPolicy":
    with importing():
        from services.reward.models.frozen_policy import FrozenPolicy

        return FrozenPolicy(settings)
