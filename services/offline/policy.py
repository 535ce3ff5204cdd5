"""A stored policy that can be asked, like the live one."""

import dataclasses
import math
from collections.abc import Iterator

from penstock.services.client.policy import Completion, Conversation, turns
from penstock.services.coordinator.admission.admission import drawn_by
from penstock.services.offline.generation import LocalPolicy
from penstock.services.offline.stored import stored_version
from penstock.shared.bus.messages import ChatMessage, GroupId, Prompt, Purpose, RolloutGroup
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings


class StoredPolicy:
    """A version of a run's files (None: newest), computed in this process. Raises PenstockError."""

    def __init__(self, settings: Settings, version: int | None) -> None:
        self._settings, self._asked = settings, 0
        with stored_version(settings, version) as stored:
            self.version, self.step = stored.version, stored.step
            self._local = LocalPolicy(stored.settings, stored.version)

    def generate(
        self,
        prompt: str | Conversation,
        *,
        samples: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Completion]:
        if samples < 1 or (max_new_tokens or 1) < 1 or not 0.0 <= (temperature or 0.0) < math.inf:
            raise SettingsError(
                "samples and max_new_tokens must be at least 1, and temperature a number of at least 0, not "
                f"{samples}, {max_new_tokens} and {temperature}"
            )
        group = next(self._local.complete([self._prompt(prompt, samples, max_new_tokens, temperature)]))
        return list(_completions(group))

    def _prompt(
        self, prompt: str | Conversation, samples: int, max_new_tokens: int | None, temperature: float | None
    ) -> Prompt:
        sampling, self._asked = self._settings.sampling, self._asked + 1
        drawn = drawn_by(sampling, samples, sampling.temperature if temperature is None else temperature)
        is_text = isinstance(prompt, str)
        return Prompt(
            GroupId(self._asked),
            "the prompt",
            dataclasses.replace(drawn, max_new_tokens=max_new_tokens or drawn.max_new_tokens),
            text=prompt if isinstance(prompt, str) else None,
            messages=None if is_text else tuple(ChatMessage(each["role"], each["content"]) for each in turns(prompt)),
            purpose=Purpose.ASK,
        )


def _completions(group: RolloutGroup) -> Iterator[Completion]:
    for sample in group.samples:
        versions = tuple(sorted(int(version) for version in sample.versions))
        yield Completion(sample.text, len(sample.token_ids), sample.finish_reason.value, versions)
