"""Logprobs of a group under a frozen model in this service (``frozen_policy``): the initial policy, or a teacher.

The reference's travel with the group (``Experience.reference_logprobs``), so no trainer rank holds the initial policy.
"""

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from penstock.services.reward.models.batcher import Batcher, NoRoom
from penstock.services.reward.models.reading import Reading, join, spans
from penstock.services.reward.models.turns import Turns
from penstock.services.reward.scorers.reward_model import require_libraries
from penstock.shared.bus.messages import RolloutGroup
from penstock.shared.errors import PermanentError, TemporaryError
from penstock.shared.model.model_source import check_model
from penstock.shared.process.importing import importing
from penstock.shared.process.memory_timeline import Held
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.models import TeacherSettings

if TYPE_CHECKING:
    from penstock.services.reward.models.frozen_policy import FrozenPolicy, TokenSequence


class Reference:
    """The frozen initial policy of a run, or ``teacher``; ``turns``: when it has its device. Raises SettingsError."""

    def __init__(self, settings: Settings, teacher: TeacherSettings | None = None, turns: Turns | None = None) -> None:
        self.name = teacher.name if teacher else "reference"
        self._settings = settings
        self._turns = turns or Turns()
        self._model = teacher.model if teacher else settings.policy.model
        self._where = f"model of {teacher.setting}" if teacher else "policy.model"
        require_libraries(teacher.setting if teacher else 'algorithm.reference = "reward"')
        check_model(self._where, self._model)
        self._top_k = settings.algorithm.distillation_top_k if teacher else 0
        self._policy: FrozenPolicy | None = None
        self._batcher: Batcher[TokenSequence, Reading] | None = None

    async def start(self, words: int = 0) -> None:
        """Load the model in a thread; a teacher's most probable tokens are of the first ``words``. Raises SettingsError."""
        opening = self._settings, self._model, self._where, self._top_k, words
        async with self._turns.loading(self.name):
            self._policy = await asyncio.to_thread(_open, *opening)
            self._batcher = Batcher(self._policy, self._settings.model_work, self.name, turns=self._turns)
            self._batcher.start()

    @property
    def held(self) -> Held | None:
        """What the policy holds on its device, once it is loaded."""
        return (
            None if self._policy is None else self._policy.held("reference" if self.name == "reference" else "weights")
        )

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()

    async def read(self, group: RolloutGroup) -> Reading:
        """Return the logprobs of all samples' tokens, concatenated (nats).

        Raises:
            TemporaryError: no memory for them now, or the model gave none.
            PermanentError: the model does not know a token.
        """
        from penstock.services.reward.models.frozen_policy import TokenSequence

        assert self._batcher is not None
        assert self._policy is not None
        largest = int(np.concatenate([group.prompt_token_ids, *(sample.token_ids for sample in group.samples)]).max())
        if largest >= self._policy.vocabulary:
            raise PermanentError(
                f"expected token ids below {self._policy.vocabulary}, found {largest} in {group.prompt.problem}: change "
                f"{self._where}"
            )
        parts, temperature = spans(group), group.prompt.sampling.temperature
        sequences = [TokenSequence(part.prompt_token_ids, part.token_ids, temperature) for part in parts]
        try:
            with self._turns.waiting(group):
                readings = await self._batcher.run(sequences)
        except NoRoom as error:
            raise TemporaryError(f"{self.name} unavailable: {error}") from error
        return join(parts, readings, self.name, group, self._top_k)


def _open(settings: Settings, model: str, where: str, top_k: int, words: int) -> "FrozenPolicy":
    with importing():
        from penstock.services.reward.models.frozen_policy import FrozenPolicy

        return FrozenPolicy(settings, model, where, top_k, words)
