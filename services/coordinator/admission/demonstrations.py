"""Demonstrations: rows with a completion, as the tokens and the experience on which the trainer trains.

::

    {"prompt": "12+34=", "completion": "46"}           ids of the prompt | ids of "46" after it, then the end
    {"messages": [{"role": "user", …}, {"role": "assistant", …}]}        prompt as generated | the rest of the template
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from services.coordinator.admission.dataset_files import BadRow
from shared.bus.messages import (
    ChatMessage,
    Experience,
    FinishReason,
    Int32Array,
    PolicyVersion,
    Prompt,
    Purpose,
    RolloutGroup,
    Sample,
    SampleScores,
    Sampling,
)
from shared.errors import PermanentError, SettingsError
from shared.model.context import own_context, read_config
from shared.model.tokenizer import TokenizerCodec, open_tokenizer
from shared.settings import Settings

if TYPE_CHECKING:
    from services.coordinator.admission.dataset import Problem

REPLICA = "demonstrations"
_ASSISTANT = "assistant"
_MESSAGES = "messages"
_UNLIMITED = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    prompt_token_ids: Int32Array
    token_ids: Int32Array
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Limits:
    context_tokens: int
    vocabulary: int


class Demonstrations:
    """Reads completions with the policy's tokenizer. Raises SettingsError: it has no token that ends a text."""

    def __init__(self, settings: Settings) -> None:
        config = read_config(settings.policy.model)
        text = config.get("text_config")
        vocabulary = {**config, **(text if isinstance(text, Mapping) else {})}.get("vocab_size")
        self._context = settings.rollout.vllm.max_model_len or own_context(config) or _UNLIMITED
        limits = _Limits(self._context, vocabulary if isinstance(vocabulary, int) else _UNLIMITED)
        self._tokenizer = open_tokenizer(settings.policy)
        self._codec = TokenizerCodec(self._tokenizer, limits, settings.data.chat_template)
        self._vocabulary = limits.vocabulary
        self._most = settings.trainer.micro_batch_tokens
        self._field = settings.data.completion_field
        self.alone = settings.algorithm.is_supervised
        """Whether every dataset is one of demonstrations."""
        if self._tokenizer.eos_token_id is None:
            raise SettingsError(
                "expected a tokenizer with a token that ends a text (eos_token), which each demonstration ends with, found none: "
                "change policy.tokenizer"
            )

    def has_completion(self, row: Mapping[str, object]) -> bool:
        turns = row.get(_MESSAGES)
        last = turns[-1] if isinstance(turns, list) and len(turns) > 1 else None
        return row.get(self._field) is not None or (isinstance(last, Mapping) and last.get("role") == _ASSISTANT)

    def split(self, row: Mapping[str, object]) -> tuple[dict[str, object], str]:
        """Return a row without its completion, and the completion. Raises BadRow."""
        rest = {name: value for name, value in row.items() if name != self._field}
        value, turns = row.get(self._field), row.get(_MESSAGES)
        if value is None and isinstance(turns, list) and len(turns) > 1:
            rest, value = {**rest, _MESSAGES: turns[:-1]}, turns[-1:]
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0].get("content") if value[0].get("role") == _ASSISTANT else None
        if not isinstance(value, str) or not value:
            raise BadRow(
                f"expected a completion in {self._field!r}, or {_MESSAGES!r} that end with the {_ASSISTANT}'s, found neither: "
                "change data.completion_field"
            )
        return rest, value

    def encode(self, problem: "Problem", completion: str) -> Demonstration:
        """Raises BadRow: the row does not fit the tokenizer, the model's context or a forward pass."""
        prompt = problem.prompt(0, _sampling(1))
        try:
            prompt_ids = self._codec.encode(prompt)
            ids = self._completion_ids(prompt, prompt_ids, completion)
        except PermanentError as error:
            raise BadRow(str(error)) from error
        for setting, most in (("the model's context", self._context), ("trainer.micro_batch_tokens", self._most)):
            if (tokens := len(prompt_ids) + len(ids)) > most:
                raise BadRow(f"expected a demonstration of at most {most} tokens ({setting}), found {tokens}")
        if int(ids.max()) >= self._vocabulary:
            raise BadRow(f"expected token ids under the model's {self._vocabulary}, found {int(ids.max())}")
        return Demonstration(prompt_ids, ids, completion)

    def _completion_ids(self, prompt: Prompt, prompt_ids: Int32Array, completion: str) -> Int32Array:
        end, begin = self._tokenizer.eos_token_id, prompt_ids.tolist()
        if prompt.messages is None:
            whole = self._tokenizer(f"{prompt.text}{completion}")["input_ids"]
            if whole[: len(begin)] != begin:  # a token would span both; a policy continues the prompt's own tokens
                whole = [*begin, *self._tokenizer(completion, add_special_tokens=False)["input_ids"]]
            ids = whole[len(begin) :]
            return np.array(ids if ids[-1:] == [end] else [*ids, end], dtype=np.int32)
        answered = (*prompt.messages, ChatMessage(_ASSISTANT, completion))
        whole = self._codec.render(dataclasses.replace(prompt, messages=answered), add_generation_prompt=False)
        if whole[: len(begin)] != begin or len(whole) == len(begin):
            raise BadRow(
                "expected a chat template that renders an answered conversation as the prompt and what follows it, found "
                "another beginning: change data.chat_template, or give prompt and completion as texts"
            )
        ids = whole[len(begin) :]
        last = len(ids) - ids[::-1].index(end) if end in ids else len(ids)
        return np.array(ids[:last], dtype=np.int32)


class Kind:
    """Whether a dataset has demonstrations or problems: all of its rows have a completion, or none has.

    ::

        {"prompt": "12+34=", "completion": "46"}   demonstrations
        {"prompt": "12+34=", "answer": "46"}       problems: the policy answers, scorers compare
    """

    def __init__(self, demonstrations: Demonstrations) -> None:
        self._demonstrations = demonstrations
        self._first: tuple[str, bool] | None = None

    def of(self, name: str, row: Mapping[str, object]) -> Demonstrations | None:
        """Return what reads the row's completion; None: it is a problem. Raises SettingsError: rows differ."""
        if self._demonstrations.alone:
            return self._demonstrations
        has = self._demonstrations.has_completion(row)
        first, had = self._first = self._first or (name, has)
        if has != had:
            with_one, without = (name, first) if has else (first, name)
            raise SettingsError(
                f"expected a completion in every row of a dataset, or in none, with algorithm.imitation > 0, found one in {with_one} and "
                f"none in {without}: complete the rows, put demonstrations and problems into separate datasets, or change "
                "data.completion_field"
            )
        return self._demonstrations if has else None


def experience(problem: "Problem", group_id: int, newest: PolicyVersion) -> Experience:
    """Return the problem's demonstration as a group that was admitted under ``newest``, ready to be trained."""
    shown = problem.demonstration
    assert shown is not None
    now_s, count = time.time(), len(shown.token_ids)
    asked = problem.prompt(group_id, _sampling(count))
    prompt = dataclasses.replace(asked, min_version=newest, purpose=Purpose.DEMONSTRATE, admitted_at_s=now_s)
    spans = np.array([[0, newest]], dtype=np.int32)
    sample = Sample(shown.token_ids, np.zeros(count, np.float32), spans, FinishReason.STOP, shown.text)
    group = RolloutGroup(prompt, shown.prompt_token_ids, (sample,), REPLICA, now_s, now_s)
    return Experience(group, np.zeros(1, np.float32), (SampleScores(()),), now_s, 0.0)


def _sampling(tokens: int) -> Sampling:
    return Sampling(samples=1, max_new_tokens=tokens, temperature=1.0)
