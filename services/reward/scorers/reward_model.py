"""Score with a reward model (``classifier``); imports no model library.

::

    group ──▶ token ids ──▶ Batcher, with samples of other groups ──▶ values ──▶ scores
                                └── NoRoom, or a value that is no number ──▶ unavailable; never worth 0

Every replica of the reward service loads the model.
"""

import asyncio
import importlib.util
import logging
import math
from typing import TYPE_CHECKING

from prometheus_client import Counter

from penstock.services.reward.models.batcher import Batcher, NoRoom
from penstock.services.reward.models.turns import Turns
from penstock.services.reward.scorers.scorer import unavailable, valued
from penstock.shared.bus import transcripts
from penstock.shared.bus.messages import RolloutGroup, Score, ScoreStatus
from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_command
from penstock.shared.model.model_source import check_model
from penstock.shared.process.importing import importing
from penstock.shared.process.memory_timeline import Held
from penstock.shared.settings.rewards.models import ModelScorer, ModelWork

if TYPE_CHECKING:
    from penstock.services.reward.models.classifier import Classifier, Text

log = logging.getLogger(__name__)

CUT = Counter("penstock_reward_model_cut_samples_total", "Samples that were too long for a model and cut.", ["scorer"])
_NEEDED = ("torch", "transformers", "safetensors")


class RewardModel:
    """Score with a reward model.

    Args:
        work: where the model runs.
        turns: when it has its device.

    Raises:
        SettingsError: invalid settings.
    """

    def __init__(self, scorer: ModelScorer, work: ModelWork, turns: Turns | None = None) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._work = work
        self._turns = turns or Turns()
        require_libraries(f"scorer {scorer.name!r}")
        check_model(scorer.model_setting, scorer.model)
        self._model: Classifier | None = None
        self._batcher: Batcher[Text, float] | None = None
        self._tokenizing = asyncio.Lock()  # tokenizers are not thread-safe

    async def start(self) -> None:
        """Load the model in a thread. Raises SettingsError."""
        async with self._turns.loading(self.name):
            self._model = await asyncio.to_thread(_open, self._scorer, self._work)
            self._batcher = Batcher(self._model, self._work, self.name, turns=self._turns)
            self._batcher.start()

    @property
    def held(self) -> Held | None:
        return None if self._model is None else self._model.held

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Return the model's value of each sample. Raises PermanentError if the chat template does not fit."""
        assert self._model is not None
        assert self._batcher is not None
        async with self._tokenizing:
            texts = await asyncio.to_thread(_read, self._model, group)
        CUT.labels(self.name).inc(sum(text.cut_tokens > 0 for text in texts))
        try:
            with self._turns.waiting(group):
                values = await self._batcher.run(texts)
        except NoRoom as error:
            return self._unavailable(group, str(error))
        if not all(map(math.isfinite, values)):
            return self._unavailable(group, f"the model gave {next(v for v in values if not math.isfinite(v))}")
        return [valued(self.name, ScoreStatus.OK, value, _how(text)) for text, value in zip(texts, values, strict=True)]

    def _unavailable(self, group: RolloutGroup, reason: str) -> list[Score]:
        return [unavailable(self.name, reason) for _ in group.samples]


def _read(model: "Classifier", group: RolloutGroup) -> "list[Text]":
    conversations = [transcripts.read(sample) for sample in group.samples]
    return model.read(group.prompt, [sample.text for sample in group.samples], conversations)


def require_libraries(whose: str) -> None:
    """Check that the model libraries are installed. Raises SettingsError."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(f"{whose} needs the package {missing[0]}: {install_command('reward-models')}")


def _open(scorer: ModelScorer, work: ModelWork) -> "Classifier":
    with importing():
        from penstock.services.reward.models.classifier import Classifier

        return Classifier(scorer, work)


def _how(text: "Text") -> str:
    return f"cut to {text.tokens} of {text.tokens + text.cut_tokens} tokens" if text.cut_tokens else ""
