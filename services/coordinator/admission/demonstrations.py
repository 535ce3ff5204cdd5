"""Demonstrations: rows with a completion, as the tokens and the experience on which the trainer trains.

::

    {"prompt": "12+34=", "completion": "46"}           ids of the prompt | ids of "46" after it, then the end
    {"messages": [{"role": "user", …}, {"role": "assistant", …}]}        prompt as generated | the rest of the template

With ``data.rejected_field`` a row is a preference pair: a group of two samples, the better one with reward 1, the other
with 0::

    {"prompt": "12+34=", "chosen": "46", "rejected": "47"}               the prompt's ids | "46", end | "47", end
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.services.coordinator.admission.dataset_files import BadRow
from penstock.shared.bus.messages import (
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
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.model.context import own_context, read_config
from penstock.shared.model.tokenizer import UNLIMITED, Limits, TokenizerCodec, encode_text, open_tokenizer, stop_tokens
from penstock.shared.settings import Settings

if TYPE_CHECKING:
    from penstock.services.coordinator.admission.dataset import Problem

REPLICA = "demonstrations"
_ASSISTANT = "assistant"
_MESSAGES = "messages"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Completion:
    token_ids: Int32Array
    text: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    prompt_token_ids: Int32Array
    completion: Completion
    rejected: Completion | None = None
    """The worse completion of a preference pair."""

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Both of a pair, the better one first."""
        return (self.completion,) if self.rejected is None else (self.completion, self.rejected)


class Demonstrations:
    """Reads completions with the policy's tokenizer. Raises SettingsError: it has no token that ends a text."""

    def __init__(self, settings: Settings) -> None:
        config = read_config(settings.policy.model)
        text = config.get("text_config")
        vocabulary = {**config, **(text if isinstance(text, Mapping) else {})}.get("vocab_size")
        self._context = settings.rollout.max_model_len or own_context(config) or UNLIMITED
        limits = Limits(self._context, vocabulary if isinstance(vocabulary, int) else UNLIMITED)
        self._tokenizer = open_tokenizer(settings.policy)
        self._codec = TokenizerCodec(self._tokenizer, limits, settings.data.chat_template, settings.reward)
        self._vocabulary, self._ends = limits.vocabulary, frozenset(stop_tokens(self._tokenizer))
        self._most = settings.trainer.micro_batch_tokens
        self._field = settings.data.completion_field
        self._rejected, self._prompt_field = settings.data.rejected_field, settings.data.prompt_field
        self.alone = not settings.kind.generates
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

    def split(self, row: Mapping[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
        """Return a row without its completion, and the completion, or both of a pair. Raises BadRow."""
        if self._rejected:
            return self._split_pair(row)
        rest = {name: value for name, value in row.items() if name != self._field}
        value, turns = row.get(self._field), row.get(_MESSAGES)
        if value is None and isinstance(turns, list) and len(turns) > 1:
            rest, value = {**rest, _MESSAGES: turns[:-1]}, turns[-1:]
        if not (text := _text(value)):
            raise BadRow(
                f"expected a completion in {self._field!r}, or {_MESSAGES!r} that end with the {_ASSISTANT}'s, found neither: "
                "change data.completion_field"
            )
        return rest, (text,)

    def _split_pair(self, row: Mapping[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
        columns = {"data.completion_field": self._field, "data.rejected_field": self._rejected}
        rest = {name: value for name, value in row.items() if name not in columns.values()}
        values = [row.get(name) for name in columns.values()]
        lists = [value for value in values if isinstance(value, list) and len(value) > 1]
        if len(lists) == 2:
            rest, values = self._without_prompt(rest, *lists), [turns[-1:] for turns in lists]
        texts = []
        for (setting, name), value in zip(columns.items(), values, strict=True):
            if not (text := _text(value)):
                raise BadRow(
                    f"expected a completion in {name!r}, as text or as a message of the {_ASSISTANT}, found none: change {setting}"
                )
            texts.append(text)
        if texts[0] == texts[1]:
            raise BadRow(
                f"expected different completions in {self._field!r} and {self._rejected!r}, found the same one twice"
            )
        return rest, tuple(texts)

    def _without_prompt(
        self, rest: Mapping[str, object], better: list[object], worse: list[object]
    ) -> dict[str, object]:
        """Return a row whose messages are the prompt of two whole conversations. Raises BadRow: they have none in common."""
        begin, last = better[:-1], better[-2]
        if begin != worse[:-1]:
            raise BadRow(
                f"expected conversations in {self._field!r} and {self._rejected!r} that differ only in their last message, found "
                "others: give the prompt in data.prompt_field, and the last message alone in both columns"
            )
        prompt = rest.get(self._prompt_field)
        given = rest.get(_MESSAGES) if prompt is None else prompt
        question = last.get("content") if isinstance(last, dict) else None
        if given is not None and given not in (begin, better, question):
            raise BadRow(
                f"expected conversations in {self._field!r} and {self._rejected!r} that begin with the row's prompt, found another "
                "prompt: change data.prompt_field"
            )
        others = {name: value for name, value in rest.items() if name not in (self._prompt_field, _MESSAGES)}
        return {**others, _MESSAGES: begin}

    def encode(self, problem: "Problem", completions: Sequence[str]) -> Demonstration:
        """Raises BadRow: the row does not fit the tokenizer, the model's context or a forward pass."""
        prompt = dataclasses.replace(problem.prompt(0, _sampling(1)), admitted_at_s=time.time())
        try:
            prompt_ids = self._codec.encode(prompt)
            encoded = [Completion(self._completion_ids(prompt, prompt_ids, text), text) for text in completions]
        except PermanentError as error:
            raise BadRow(str(error)) from error
        shown = Demonstration(prompt_ids, *encoded)
        self._check(shown)
        return shown

    def _check(self, shown: Demonstration) -> None:
        lengths, kind = [len(each.token_ids) for each in shown.completions], "demonstration"
        if shown.rejected is not None:
            kind = "pair"
            if np.array_equal(shown.completion.token_ids, shown.rejected.token_ids):
                raise BadRow(
                    f"expected different tokens of the completions in {self._field!r} and {self._rejected!r}, found the same"
                )
        for setting, most, longest in (
            ("the model's context", self._context, max(lengths)),
            ("trainer.micro_batch_tokens", self._most, sum(lengths)),
        ):
            if (tokens := len(shown.prompt_token_ids) + longest) > most:
                raise BadRow(f"expected a {kind} of at most {most} tokens ({setting}), found {tokens}")
        if (largest := max(int(each.token_ids.max()) for each in shown.completions)) >= self._vocabulary:
            raise BadRow(f"expected token ids under the model's {self._vocabulary}, found {largest}")

    def _completion_ids(self, prompt: Prompt, prompt_ids: Int32Array, completion: str) -> Int32Array:
        end, begin = self._tokenizer.eos_token_id, prompt_ids.tolist()
        if prompt.messages is None:
            whole = encode_text(self._tokenizer, f"{prompt.text}{completion}")
            if whole[: len(begin)] != begin:  # a token would span both; a policy continues the prompt's own tokens
                whole = [*begin, *self._tokenizer(completion, add_special_tokens=False)["input_ids"]]
            ids = whole[len(begin) :]
            return np.array(ids if ids[-1:] == [end] else [*ids, end], dtype=np.int32)
        answered = dataclasses.replace(prompt, messages=(*prompt.messages, ChatMessage(_ASSISTANT, completion)))
        self._check_rendered(self._codec.rendered(answered, add_generation_prompt=False), completion)
        whole = self._codec.render(answered, add_generation_prompt=False)
        if whole[: len(begin)] != begin or len(whole) == len(begin):
            raise BadRow(
                "expected a chat template that renders an answered conversation as the prompt and what follows it, found "
                "another beginning: change data.chat_template, or give prompt and completion as texts"
            )
        ids = whole[len(begin) :]
        last = max((place for place, token_id in enumerate(ids, 1) if token_id in self._ends), default=0)
        while last > 1 and ids[last - 2] in self._ends:
            last -= 1
        return np.array(ids[:last] if last else [*ids, end], dtype=np.int32)

    def _check_rendered(self, rendered: str, completion: str) -> None:
        text, plain = self._codec.plain(rendered), self._codec.plain(completion)
        if not text.endswith(plain):
            change = "puts text after it" if plain in text else "leaves a part of it out"
            raise BadRow(
                f"expected a chat template that renders the {_ASSISTANT}'s message as it is, and ends it with special tokens of "
                f"the tokenizer, but it {change}: change policy.tokenizer, or give prompt and completion as texts"
            )


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
    now_s, completions = time.time(), shown.completions
    longest = max(len(each.token_ids) for each in completions)
    asked = problem.prompt(group_id, _sampling(longest, len(completions)))
    prompt = dataclasses.replace(asked, min_version=newest, purpose=Purpose.DEMONSTRATE, admitted_at_s=now_s)
    spans = np.array([[0, newest]], dtype=np.int32)
    samples = tuple(
        Sample(each.token_ids, np.zeros(len(each.token_ids), np.float32), spans, FinishReason.STOP, each.text)
        for each in completions
    )
    group = RolloutGroup(prompt, shown.prompt_token_ids, samples, REPLICA, now_s, now_s)
    rewards = np.array([0.0] if shown.rejected is None else [1.0, 0.0], np.float32)
    return Experience(group, rewards, tuple(SampleScores(()) for _ in samples), now_s, 0.0)


def _sampling(tokens: int, samples: int = 1) -> Sampling:
    return Sampling(samples=samples, max_new_tokens=tokens, temperature=1.0)


def _text(value: object) -> str | None:
    """Return a completion, a text or a list with a message of the assistant, or None."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content") if value[0].get("role") == _ASSISTANT else None
    return value if isinstance(value, str) else None
