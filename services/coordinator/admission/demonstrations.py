"""Demonstrations: rows with a completion, as the tokens and the experience on which the trainer trains.

::

    {"prompt": "12+34=", "completion": "46"}           ids of the prompt | ids of "46" after it, then the end
    {"messages": [{"role": "user", …}, {"role": "assistant", …}]}        prompt as generated | the rest of the template

Of several turns (:mod:`conversations <penstock.services.coordinator.admission.conversations>`) the assistant's are
sampled segments. With ``data.rejected_field`` a row is a preference pair: a group of two samples, the better one with reward 1, the other
with 0::

    {"prompt": "12+34=", "chosen": "46", "rejected": "47"}               the prompt's ids | "46", end | "47", end
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.services.coordinator.admission.conversations import (
    ASSISTANT,
    Conversation,
    Reader,
    answer_of,
    conversation_of,
    is_assistants,
    tools_of,
)
from penstock.services.coordinator.admission.dataset_files import COMPLETION, MESSAGES, PROMPT, BadRow, advice
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
    no_ids,
    no_segments,
)
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.model.tokenizer import Limits, TokenizerCodec, encode_text, open_tokenizer, stop_tokens
from penstock.shared.settings import Settings

if TYPE_CHECKING:
    from penstock.services.coordinator.admission.dataset import Problem

REPLICA = "demonstrations"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Completion:
    token_ids: Int32Array
    text: str
    segments: Int32Array = dataclasses.field(default_factory=no_segments)

    @property
    def spans(self) -> list[tuple[int, int, bool]]:
        """First token, the one after the last, and whether it is trained, of each segment."""
        firsts = self.segments[:, 0].tolist() or [0]
        trained = (self.segments[:, 2] == 1).tolist() or [True]
        return list(zip(firsts, [*firsts[1:], len(self.token_ids)], trained, strict=True))


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


class CompletionColumns:
    """Finds the completions of rows. Needs no tokenizer."""

    def __init__(self, settings: Settings) -> None:
        self._field = settings.data.completion_field
        self._rejected, self._prompt_field = settings.data.rejected_field, settings.data.prompt_field
        self.alone = not settings.kind.generates
        """Whether every dataset is one of demonstrations."""

    def has_completion(self, row: Mapping[str, object]) -> bool:
        turns = row.get(MESSAGES)
        last = turns[-1] if isinstance(turns, list) and len(turns) > 1 else None
        return row.get(self._field) is not None or is_assistants(last)

    def split(self, row: Mapping[str, object]) -> tuple[dict[str, object], tuple[str | Conversation, ...]]:
        """Return a row without its completion, and the completion, or both of a pair. Raises BadRow."""
        columns = {"data.completion_field": self._field}
        if self._rejected:
            columns["data.rejected_field"] = self._rejected
        rest = {name: value for name, value in row.items() if name not in columns.values()}
        rest, values = self._without_prompt(rest, [row.get(name) for name in columns.values()])
        asked = next((name for name in (self._prompt_field, MESSAGES) if rest.get(name) is not None), MESSAGES)
        tools = tools_of(row) if isinstance(rest.get(asked), list) else None
        answers = []
        for (setting, name), value in zip(columns.items(), values, strict=True):
            if not (answer := answer_of(value, rest.get(asked), tools, name)):
                form = f"or {MESSAGES!r} that end with the {ASSISTANT}'s, found neither"
                if self._rejected:
                    form = f"as text or as a message of the {ASSISTANT}, found none"
                lacking = [PROMPT, COMPLETION] if rest.get(asked) is None else [COMPLETION]
                known = "" if self._rejected else advice(row, lacking)
                raise BadRow(f"expected a completion in {name!r}, {form}: change {setting}{known}")
            answers.append(answer)
        if answers[1:] == answers[:1]:
            raise BadRow(
                f"expected different completions in {self._field!r} and {self._rejected!r}, found the same one twice"
            )
        for answer in answers:
            if isinstance(answer, Conversation):
                rest = {**rest, asked: answer.prompt}
        return rest, tuple(answers)

    def _without_prompt(
        self, rest: dict[str, object], values: list[object]
    ) -> tuple[dict[str, object], Sequence[object]]:
        """Return the row with its prompt, and the completions alone, where they are whole conversations. Raises BadRow."""
        names, wholes = [self._field, self._rejected], values
        if not self._rejected:
            names, wholes = [MESSAGES], [] if values[0] is not None else [rest.get(MESSAGES)]
        turns = [value for value in wholes if isinstance(value, list) and len(value) > 1]
        if len(turns) < len(values) or (self._rejected and all(is_assistants(each[0]) for each in turns)):
            return rest, values
        first, columns = _first_answer(turns), " and ".join(map(repr, names))
        if not first and not self._rejected:
            return rest, values
        if not first:
            raise BadRow(
                f"expected conversations in {columns} that begin with the same question, found others: give the prompt in "
                f"data.prompt_field, and the {ASSISTANT}'s messages alone in both columns"
            )
        begin, answers = turns[0][:first], [*(each[first:] for each in turns)]
        if not self._rejected and len(answers[0]) == 1:
            return {**rest, MESSAGES: begin}, answers
        prompt, last = rest.get(self._prompt_field), begin[-1]
        question = last.get("content") if isinstance(last, dict) else None
        given = rest.get(MESSAGES) if prompt is None else prompt
        if given is not None and given not in (begin, turns[0], question):
            raise BadRow(
                f"expected conversations in {columns} that begin with the row's prompt, found another prompt: change "
                "data.prompt_field"
            )
        others = {name: value for name, value in rest.items() if name not in (self._prompt_field, MESSAGES)}
        return {**others, MESSAGES: begin}, answers


class Demonstrations(CompletionColumns):
    """Reads completions with the policy's tokenizer. Raises SettingsError: it has no token that ends a text."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        limits = Limits.of(settings)
        self._context = limits.context_tokens
        self._tokenizer = open_tokenizer(settings.policy, alone=True)
        self._codec = TokenizerCodec(self._tokenizer, limits, settings.data.chat_template, settings.reward)
        self._vocabulary, ends = limits.vocabulary, frozenset(stop_tokens(self._tokenizer))
        self._turns = Reader(self._codec, ends, self._tokenizer.eos_token_id, self._context)
        self._most, self._setting = settings.trainer.row_tokens, settings.trainer.row_setting
        if self._tokenizer.eos_token_id is None:
            raise SettingsError(
                "expected a tokenizer with a token that ends a text (eos_token), which each demonstration ends with, found none: "
                "change policy.tokenizer"
            )

    def encode(self, problem: "Problem", completions: Sequence[str | Conversation]) -> Demonstration:
        """Raises BadRow: the row does not fit the tokenizer, the model's context or a forward pass."""
        prompt = dataclasses.replace(problem.prompt(0, _sampling(1)), admitted_at_s=time.time())
        try:
            if prompt.messages is None:
                prompt_ids = self._codec.encode(prompt)
                encoded = [
                    Completion(self._completion_ids(prompt, prompt_ids, str(text)), str(text)) for text in completions
                ]
            else:
                prompt_ids, encoded = self._encode_turns(prompt, prompt.messages, completions)
        except PermanentError as error:
            raise BadRow(str(error)) from error
        shown = Demonstration(prompt_ids, *encoded)
        self._check(shown)
        return shown

    def _encode_turns(
        self, prompt: Prompt, messages: tuple[ChatMessage, ...], completions: Sequence[str | Conversation]
    ) -> tuple[Int32Array, list[Completion]]:
        prompt_ids, encoded = no_ids(), []
        for each in completions:
            prompt_ids, ids, segments = self._turns.encode(conversation := conversation_of(each, messages), prompt)
            encoded.append(Completion(ids, conversation.text, segments))
        return prompt_ids, encoded

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
            (self._setting, self._most, sum(lengths)),
        ):
            if (tokens := len(shown.prompt_token_ids) + longest) > most:
                raise BadRow(f"expected a {kind} of at most {most} tokens ({setting}), found {tokens}")
        if (largest := max(int(each.token_ids.max()) for each in shown.completions)) >= self._vocabulary:
            raise BadRow(f"expected token ids under the model's {self._vocabulary}, found {largest}")

    def _completion_ids(self, prompt: Prompt, prompt_ids: Int32Array, completion: str) -> Int32Array:
        end, begin = self._tokenizer.eos_token_id, prompt_ids.tolist()
        whole = encode_text(self._tokenizer, f"{prompt.text}{completion}")
        if whole[: len(begin)] != begin:  # a token would span both; a policy continues the prompt's own tokens
            whole = [*begin, *self._tokenizer(completion, add_special_tokens=False)["input_ids"]]
        ids = whole[len(begin) :]
        return np.array(ids if ids[-1:] == [end] else [*ids, end], dtype=np.int32)


class Kind:
    """Whether a dataset has demonstrations or problems: all of its rows have a completion, or none has.

    ::

        {"prompt": "12+34=", "completion": "46"}   demonstrations
        {"prompt": "12+34=", "answer": "46"}       problems: the policy answers, scorers compare
    """

    def __init__(self, columns: CompletionColumns) -> None:
        self._columns = columns
        self._first: tuple[str, bool] | None = None

    def is_shown(self, name: str, row: Mapping[str, object]) -> bool:
        """Return whether the row is a demonstration. Raises SettingsError: rows differ."""
        if self._columns.alone:
            return True
        has = self._columns.has_completion(row)
        first, had = self._first = self._first or (name, has)
        if has != had:
            with_one, without = (name, first) if has else (first, name)
            raise SettingsError(
                f"expected a completion in every row of a dataset, or in none, with algorithm.imitation > 0, found one in {with_one} and "
                f"none in {without}: complete the rows, put demonstrations and problems into separate datasets, or change "
                "data.completion_field"
            )
        return has


def _first_answer(wholes: Sequence[list[object]]) -> int:
    """Return where the assistant's turns begin, of two those up to the first difference; 0: nowhere."""
    turns, *others = wholes
    if not others:
        begins = (at for at in range(1, len(turns)) if is_assistants(turns[at]) and not is_assistants(turns[at - 1]))
        return next(begins, 0)
    shortest = min(len(turns), len(others[0])) - 1
    equal = next((at for at in range(shortest) if turns[at] != others[0][at]), shortest)
    return next((at for at in range(equal, 0, -1) if all(is_assistants(whole[at]) for whole in wholes)), 0)


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
        Sample(
            each.token_ids,
            np.zeros(len(each.token_ids), np.float32),
            spans,
            FinishReason.STOP,
            each.text,
            segments=each.segments,
        )
        for each in completions
    )
    group = RolloutGroup(prompt, shown.prompt_token_ids, samples, REPLICA, now_s, now_s)
    rewards = np.array([0.0] if shown.rejected is None else [1.0, 0.0], np.float32)
    return Experience(group, rewards, tuple(SampleScores(()) for _ in samples), now_s, 0.0)


def _sampling(tokens: int, samples: int = 1) -> Sampling:
    return Sampling(samples=samples, max_new_tokens=tokens, temperature=1.0)
