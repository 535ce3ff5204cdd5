"""Logprobs of the policy's tokens under teachers, for distillation (docs/rewards.md, "Teachers").

::

    group ──▶ its teachers ──┬── in this service ──▶ Reference: the model's own batches
                             └── at a url ──▶ POST /v1/completions with prompt_logprobs, a request per sample
          ──▶ log of the mean probability over its teachers ──▶ Sample.teacher_logprobs

A teacher whose vocabulary differs from the policy's is refused: at the start, or as soon as its endpoint answers.
"""

import asyncio
import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from services.reward.endpoint import Endpoint, NoAnswer
from services.reward.reference import Reference
from shared.bus.messages import Float32Array, RolloutGroup, Sample
from shared.errors import SettingsError, TemporaryError
from shared.process.importing import importing
from shared.settings import Settings
from shared.settings.rewards.models import TeacherSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 120.0
_IDS_PER_REQUEST = 1024
_LEAST_LOGPROB = -1e6
_ROUNDING = 0.1
"""A logprob up to this above 0 is rounding."""


class EndpointTeacher:
    """A teacher behind a vLLM server. Raises SettingsError."""

    def __init__(self, settings: Settings, teacher: TeacherSettings) -> None:
        self.name = teacher.name
        self._settings, self._teacher = settings, teacher
        self._endpoint = Endpoint(
            teacher.name, teacher.setting, teacher.url, teacher.key_source, "logprob of each token", timeout_s=TIMEOUT_S
        )
        self._comparing = asyncio.Lock()
        self._tokenizer: Any = None
        self._compared = False

    async def start(self) -> None:
        """Compare the vocabularies, if the endpoint is up. Raises SettingsError."""
        try:
            await self._compare()
        except TemporaryError as error:
            log.warning("teacher not compared yet", extra={"teacher": self.name, "reason": str(error)})

    async def close(self) -> None:
        """Stop."""
        await self._endpoint.close()

    async def logprobs(self, group: RolloutGroup) -> Float32Array:
        """Return the logprobs of all samples' tokens, concatenated (nats).

        Raises:
            TemporaryError: the endpoint cannot work now.
        """
        try:
            await self._compare()
            parts = await asyncio.gather(*(self._ask(group, sample) for sample in group.samples))
        except (TemporaryError, SettingsError) as error:
            raise TemporaryError(f"{self.name} unavailable: {error}") from error
        return np.concatenate(parts)

    async def _ask(self, group: RolloutGroup, sample: Sample) -> Float32Array:
        token_ids = [*group.prompt_token_ids.tolist(), *sample.token_ids.tolist()]
        completion = sample.token_ids.tolist()
        body = {
            "model": self._teacher.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }

        def parse(answer: Any) -> Float32Array:
            rows = answer["choices"][0]["prompt_logprobs"]
            if not isinstance(rows, list) or len(rows) != len(token_ids):
                raise ValueError("another number of tokens")
            pairs = zip(rows[-len(completion) :], completion, strict=True)
            return np.array([_logprob(row, token_id) for row, token_id in pairs], dtype=np.float32)

        return await self._endpoint.ask("completions", body, parse, _as_is)

    async def _compare(self) -> None:
        """Compare the text of each token once. Raises SettingsError or TemporaryError."""
        async with self._comparing:
            if self._compared:
                return
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(_open_tokenizer, self._settings, "", "policy.tokenizer")
            ids = sorted(self._tokenizer.get_vocab().values())
            for start in range(0, len(ids), _IDS_PER_REQUEST):
                await self._compare_text(ids[start : start + _IDS_PER_REQUEST])
            self._compared = True

    async def _compare_text(self, ids: Sequence[int]) -> None:
        body = {"model": self._teacher.model, "tokens": ids}
        try:
            text = await self._endpoint.ask("../detokenize", body, lambda answer: answer["prompt"], _as_is)
        except NoAnswer as error:
            raise TemporaryError(f"could not compare its vocabulary with the policy's: {error}") from error
        if text != await asyncio.to_thread(self._tokenizer.decode, ids):
            raise _other_vocabulary(self._teacher)


Teacher = EndpointTeacher | Reference


class Teachers:
    """All teachers of a run. Raises SettingsError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        if settings.algorithm.distillation and not settings.reward.teachers:
            raise SettingsError(
                f"expected [[reward.teachers]] with algorithm.distillation = {settings.algorithm.distillation:g}, found none: "
                "change one of them"
            )
        self._named: Mapping[str, Teacher] = {
            of.name: EndpointTeacher(settings, of) if of.url else Reference(settings, of)
            for of in settings.reward.teachers
        }

    @property
    def parts(self) -> Sequence[Teacher]:
        """The teachers."""
        return list(self._named.values())

    async def start(self) -> None:
        """Compare the vocabularies and load the models. Raises SettingsError."""
        for of in self._settings.reward.teachers:
            if not of.url:
                await asyncio.to_thread(_check_vocabulary, self._settings, of)
            await self._named[of.name].start()

    def of(self, group: RolloutGroup) -> Sequence[Teacher]:
        """Return the teachers of a group's problem."""
        names = group.prompt.teachers if self._settings.data.teacher_field else self._named
        return [self._named[name] for name in names]


def taught(group: RolloutGroup, logprobs: Sequence[Float32Array]) -> RolloutGroup:
    """Return ``group`` with the logprobs of its teachers' mixture, each concatenated over the samples.

    The mixture's probability of a token is the mean of the teachers', so that of one teacher is its own.
    """
    if not logprobs:
        return group
    mixture = np.logaddexp.reduce(np.stack(logprobs).astype(np.float64), axis=0) - math.log(len(logprobs))
    whole = np.minimum(mixture, 0.0).astype(np.float32)
    parts = np.split(whole, np.cumsum([len(sample.token_ids) for sample in group.samples])[:-1])
    samples = zip(group.samples, parts, strict=True)
    return dataclasses.replace(
        group, samples=tuple(dataclasses.replace(sample, teacher_logprobs=part) for sample, part in samples)
    )


async def _as_is(answer: T) -> T:
    return answer


def _logprob(row: Any, token_id: int) -> float:
    value = row[str(token_id)]["logprob"]
    if type(value) not in (int, float) or not _LEAST_LOGPROB <= value <= _ROUNDING:
        raise ValueError("no logprob")
    return float(value)


def _check_vocabulary(settings: Settings, teacher: TeacherSettings) -> None:
    own = _open_tokenizer(settings, "", "policy.tokenizer")
    theirs = _open_tokenizer(settings, teacher.model, f"model of {teacher.setting}")
    if own.get_vocab() != theirs.get_vocab():
        raise _other_vocabulary(teacher)


def _other_vocabulary(teacher: TeacherSettings) -> SettingsError:
    return SettingsError(
        f"expected a teacher with the policy's vocabulary, since it reads the policy's token ids, found another: change model of "
        f"{teacher.setting}"
    )


def _open_tokenizer(settings: Settings, source: str, where: str) -> Any:
    """Open the tokenizer of ``source``; "": the policy's. Raises SettingsError."""
    with importing():
        from transformers import AutoTokenizer

    policy = settings.policy
    place = source or policy.tokenizer or policy.model
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=policy.trust_remote_code and not source)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise SettingsError(f"could not load a tokenizer from {place!r} ({error}): change {where}") from error
