"""Logprobs of the policy's tokens under teachers, for distillation (docs/rewards.md, "Teachers").

::

    group ──▶ its teachers ──┬── in this service ──▶ Reference: the model's own batches
                             └── at a url ──▶ POST /v1/completions with prompt_logprobs, a request per branch
          ──▶ log of the mean probability over its teachers ──▶ Sample.teacher_logprobs
              and of one teacher, with algorithm.distillation_top_k, its most probable tokens ──▶ Sample.teacher_top_*

A teacher whose vocabulary differs from the policy's is refused: at the start, or as soon as its endpoint answers.
"""

import asyncio
import dataclasses
import itertools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from penstock.services.reward.endpoint import Endpoint, NoAnswer, Refused
from penstock.services.reward.models.reading import Reading, join, spans
from penstock.services.reward.models.turns import Turns
from penstock.services.reward.reference import Reference
from penstock.shared.bus.messages import RolloutGroup
from penstock.shared.errors import PermanentError, SettingsError, TemporaryError
from penstock.shared.http.answer import Answer
from penstock.shared.http.client import LARGEST_BYTES
from penstock.shared.process.importing import importing
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.models import TeacherSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 120.0
_TOKENS_PER_S = 5_000
"""That an endpoint reads at least; the samples of a group are asked for together."""
_IDS_PER_REQUEST = 1024
_ENTRY_BYTES = 128
"""Of a most probable token in an answer's JSON: vLLM's have about 80."""
_LONGEST_ENTRY = 1_024
"""Characters of one."""
_ROWS = re.compile(r'"prompt_logprobs"\s*:\s*\[')
"""In a text of an answer this has a backslash before its second quote."""
_DECODER = json.JSONDecoder()
_LEAST_LOGPROB = -1e6
_ROUNDING = 0.1
"""A logprob up to this above 0 is rounding."""


class EndpointTeacher:
    """A teacher behind a vLLM server. Raises SettingsError."""

    def __init__(self, settings: Settings, teacher: TeacherSettings) -> None:
        self.name = teacher.name
        self._settings, self._teacher = settings, teacher
        self._top_k = settings.algorithm.distillation_top_k
        self._endpoint = Endpoint(
            teacher.name,
            teacher.setting,
            teacher.url,
            teacher.key_source,
            f"logprob of each token and of {self._top_k} most probable ones"
            if self._top_k
            else "logprob of each token",
            timeout_s=max(TIMEOUT_S, settings.sampling.group_size * settings.sampling.max_new_tokens / _TOKENS_PER_S),
        )
        self._comparing = asyncio.Lock()
        self._tokenizer: Any = None
        self._compared = False
        self._words = 0
        """The policy's vocabulary, once it was compared."""

    async def start(self) -> None:
        """Compare the vocabularies, if the endpoint is up. Raises SettingsError."""
        try:
            await self._compare()
        except TemporaryError as error:
            log.warning("teacher not compared yet", extra={"teacher": self.name, "reason": str(error)})

    async def close(self) -> None:
        await self._endpoint.close()

    async def read(self, group: RolloutGroup) -> Reading:
        """Return the logprobs of all samples' tokens, concatenated (nats).

        Raises:
            TemporaryError: the endpoint cannot work now.
        """
        parts = spans(group)
        asked = [(part.prompt_token_ids.tolist(), part.token_ids.tolist()) for part in parts]
        try:
            await self._compare()
            readings = await asyncio.gather(*(self._ask(*each) for each in asked))
        except (TemporaryError, SettingsError) as error:
            raise TemporaryError(f"{self.name} unavailable: {error} ({group.prompt.problem})") from error
        reading = join(parts, readings, self.name, group, self._top_k)
        if reading.top_ids_NK is not None and (largest := int(reading.top_ids_NK.max())) >= self._words:
            raise TemporaryError(
                f"{self.name} unavailable: expected most probable tokens below {self._words}, the policy's vocabulary, found {largest} "
                f"({group.prompt.problem}): lower algorithm.distillation_top_k, or give the teacher's folder as its model"
            )
        return reading

    async def _ask(self, prompt: Sequence[int], completion: Sequence[int]) -> Reading:
        token_ids = [*prompt, *completion]
        body = {
            "model": self._teacher.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self._top_k,
        }

        def parse(answer: Answer) -> Reading:
            return _reading(answer.content.decode(), len(prompt), completion, self._top_k)

        largest_bytes = LARGEST_BYTES + len(token_ids) * (self._top_k + 1) * _ENTRY_BYTES
        return await self._endpoint.ask("completions", body, parse, _as_is, largest_bytes)

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
            self._words = ids[-1] + 1
            if self._top_k:
                await self._try_out(ids[:2])
            self._compared = True

    async def _try_out(self, ids: Sequence[int]) -> None:
        """Ask for the most probable tokens once. Raises SettingsError or TemporaryError."""
        _check_top_k(self._top_k, self._words)
        try:
            await self._ask(ids[:1], ids[1:])
        except Refused as error:
            raise SettingsError(
                f"expected a server that gives the {self._top_k} most probable tokens of {self._teacher.setting}, but it refused: {error}: "
                f"start it with --max-logprobs {self._top_k}, or lower algorithm.distillation_top_k"
            ) from error

    async def _compare_text(self, ids: Sequence[int]) -> None:
        body = {"model": self._teacher.model, "tokens": ids}
        try:
            text = await self._endpoint.ask("../detokenize", body, lambda answer: answer.json()["prompt"], _as_is)
        except NoAnswer as error:
            raise TemporaryError(f"could not compare its vocabulary with the policy's: {error}") from error
        if text != await asyncio.to_thread(self._tokenizer.decode, ids):
            raise _other_vocabulary(self._teacher)


Teacher = EndpointTeacher | Reference


class Teachers:
    """All teachers of a run; ``turns``: when those in this service have their device. Raises SettingsError."""

    def __init__(self, settings: Settings, turns: Turns | None = None) -> None:
        self._settings = settings
        if settings.algorithm.distillation and not settings.reward.teachers:
            raise SettingsError(
                f"expected [[reward.teachers]] with algorithm.distillation = {settings.algorithm.distillation:g}, found none: "
                "change one of them"
            )
        self._named: Mapping[str, Teacher] = {
            of.name: EndpointTeacher(settings, of) if of.url else Reference(settings, of, turns)
            for of in settings.reward.teachers
        }

    @property
    def parts(self) -> Sequence[Teacher]:
        return list(self._named.values())

    async def start(self) -> None:
        """Compare the vocabularies and load the models. Raises SettingsError."""
        for of in self._settings.reward.teachers:
            teacher = self._named[of.name]
            if isinstance(teacher, EndpointTeacher):
                await teacher.start()
                continue
            words = await asyncio.to_thread(_check_vocabulary, self._settings, of)
            _check_top_k(self._settings.algorithm.distillation_top_k, words)
            await teacher.start(words)

    def of(self, group: RolloutGroup) -> Sequence[Teacher]:
        """Return the teachers of a group's problem. Raises PermanentError."""
        names = list(group.prompt.teachers if self._settings.data.teacher_field else self._named)
        if self._settings.algorithm.distillation_top_k and len(names) > 1:
            raise PermanentError(
                f"expected one teacher of {group.prompt.problem} with algorithm.distillation_top_k, as a mixture's most probable tokens "
                f"are not known from theirs, found {', '.join(names)}: name one in the column data.teacher_field, or set "
                "algorithm.distillation_top_k = 0"
            )
        return [self._named[name] for name in names]


def taught(group: RolloutGroup, readings: Sequence[Reading]) -> RolloutGroup:
    """Return ``group`` with the logprobs of its teachers' mixture, and the most probable tokens of a single teacher.

    The mixture's probability of a token is the mean of the teachers', so that of one teacher is its own.
    """
    if not readings:
        return group
    logprobs = np.stack([reading.logprobs_N for reading in readings]).astype(np.float64)
    mixture = np.logaddexp.reduce(logprobs, axis=0) - math.log(len(readings))
    ends = np.cumsum([len(sample.token_ids) for sample in group.samples])[:-1]
    changes: list[dict[str, Any]] = [
        {"teacher_logprobs": part} for part in np.split(np.minimum(mixture, 0.0).astype(np.float32), ends)
    ]
    ids_NK, top_NK = readings[0].top_ids_NK, readings[0].top_logprobs_NK
    if ids_NK is not None and top_NK is not None:
        tops = zip(np.split(ids_NK, ends), np.split(top_NK, ends), strict=True)
        changes = [
            {**change, "teacher_top_ids": ids, "teacher_top_logprobs": top}
            for change, (ids, top) in zip(changes, tops, strict=True)
        ]
    samples = zip(group.samples, changes, strict=True)
    return dataclasses.replace(
        group, samples=tuple(dataclasses.replace(sample, **change) for sample, change in samples)
    )


async def _as_is(answer: T) -> T:
    return answer


def _reading(text: str, before: int, completion: Sequence[int], top_k: int) -> Reading:
    """Return what an answer's rows say of the completion's tokens, which follow ``before`` others. Raises ValueError."""
    logprobs, ids, tops = [], [], []
    rows = _rows(text, before + len(completion), (top_k + 2) * _LONGEST_ENTRY)
    for token_id, row in zip(completion, itertools.islice(rows, before, None), strict=True):
        logprobs.append(_logprob(row, token_id))
        if top_k:
            pairs = _most_probable(row, top_k)
            ids.append([token_id for token_id, _ in pairs])
            tops.append([value for _, value in pairs])
    logprobs_N = np.array(logprobs, dtype=np.float32)
    if not top_k:
        return Reading(logprobs_N)
    return Reading(logprobs_N, np.array(ids, dtype=np.int32), np.array(tops, dtype=np.float32))


def _rows(text: str, count: int, longest: int) -> Iterator[Any]:
    """Yield the rows of ``prompt_logprobs``, parsed one by one, so that no call holds the interpreter for long.

    Raises:
        ValueError: another number of rows than ``count``, or one of more than ``longest`` characters.
    """
    opening = _ROWS.search(text)
    if opening is None:
        raise ValueError("no prompt_logprobs")
    at = opening.end()
    for number in range(1, count + 1):
        part = text[at : at + longest].lstrip()
        skipped = min(longest, len(text) - at) - len(part)
        row, end = _DECODER.raw_decode(part)
        rest = part[end:].lstrip()
        if not rest.startswith("]" if number == count else ","):
            raise ValueError("another number of tokens")
        yield row
        at += skipped + len(part) - len(rest) + 1


def _logprob(row: Any, token_id: int | str) -> float:
    value = row[str(token_id)]["logprob"]
    if type(value) not in (int, float) or not _LEAST_LOGPROB <= value <= _ROUNDING:
        raise ValueError("no logprob")
    return float(value)


def _most_probable(row: Any, top_k: int) -> list[tuple[int, float]]:
    """Return the ``top_k`` most probable tokens of an answer's row, by id; the sampled token may be there besides them."""
    logprobs = {int(token_id): min(_logprob(row, token_id), 0.0) for token_id in row}
    if len(logprobs) < top_k or not 0 <= min(logprobs) <= max(logprobs) < 1 << 31:
        raise ValueError("too few tokens, or others")
    return sorted(sorted(logprobs.items(), key=lambda pair: -pair[1])[:top_k])


def _check_top_k(top_k: int, words: int) -> None:
    if top_k > words:
        raise SettingsError(
            f"expected algorithm.distillation_top_k up to {words}, the tokens of the policy's vocabulary, found {top_k}: lower it"
        )


def _check_vocabulary(settings: Settings, teacher: TeacherSettings) -> int:
    """Return the number of words that teacher and policy share. Raises SettingsError."""
    own = _open_tokenizer(settings, "", "policy.tokenizer")
    theirs = _open_tokenizer(settings, teacher.model, f"model of {teacher.setting}")
    if own.get_vocab() != theirs.get_vocab():
        raise _other_vocabulary(teacher)
    return int(max(own.get_vocab().values())) + 1


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
