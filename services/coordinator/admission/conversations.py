"""Conversations: which tokens of a rendered conversation are the assistant's.

A turn of the assistant is what the chat template adds to the messages before it with a generation prompt, up to its end
token. Renderings of more messages must begin with those of fewer::

    turns      user            assistant    tool                 assistant
    tokens     prompt_token_ids | sampled   | given              | sampled
               └ turns[:1], generation prompt
                                └ turns[:2] └ turns[:3], generation prompt
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from penstock.services.coordinator.admission.dataset_files import BadRow, plain
from penstock.shared.bus.messages import ChatMessage, Int32Array, Json, Prompt, no_segments
from penstock.shared.model.tokenizer import TokenizerCodec
from penstock.shared.settings import DataSettings

ASSISTANT = "assistant"
_CALLS, _REASONING = "tool_calls", ("reasoning_content", "reasoning", "thinking")

Turn: TypeAlias = Mapping[str, Json]
Question: TypeAlias = tuple[str | None, tuple[ChatMessage, ...] | None]
"""A prompt: a text, or messages."""
_PLACE = re.compile(r"\{(?:prompt|extra\.(?P<column>[^{}\s]+))\}")


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    first: int
    """How many turns are the prompt."""
    tools: Json = None

    @property
    def learned(self) -> Json:
        """What a row's digest has of it."""
        return [[dict(turn) for turn in self.turns[self.first :]], self.tools]

    @property
    def prompt(self) -> list[Json]:
        """Its messages' roles and texts."""
        return [{"role": turn["role"], "content": turn["content"] or ""} for turn in self.turns[: self.first]]

    @property
    def text(self) -> str:
        """The last turn's."""
        return str(self.turns[-1]["content"] or "")


def framed(question: Question, row: Mapping[str, object], data: DataSettings) -> Question:
    """Return a question with ``data.user`` around a text and ``data.system`` before the first message. Raises BadRow."""
    text, messages = question
    if data.user:
        if text is None:
            raise BadRow("expected a text as the prompt, which data.user makes a message, found messages: leave it out")
        asked, values = text, iter(inserted(row, data))
        filled = _PLACE.sub(lambda place: next(values) if place["column"] else asked, data.user)
        text, messages = None, (ChatMessage("user", filled),)
    if not data.system:
        return text, messages
    turns = (ChatMessage("user", text),) if messages is None and text is not None else messages or ()
    return None, turns if turns[0].role == "system" else (ChatMessage("system", data.system), *turns)


def inserted(row: Mapping[str, object], data: DataSettings) -> list[str]:
    """Return the columns' values in ``data.user``, in its order. Raises BadRow."""
    columns = [place["column"] for place in _PLACE.finditer(data.user) if place["column"]]
    for column in columns:
        if not isinstance(row.get(column), (str, int, float)):
            raise BadRow(
                f"expected text or a number in {column!r}, which data.user names, found none: change data.user"
            )
    return [str(row[column]) for column in columns]


def conversation_of(completion: str | Conversation, messages: Sequence[ChatMessage]) -> Conversation:
    """Return what follows ``messages``, which may begin with more than a conversation's prompt (``data.system``)."""
    before: list[Turn] = [{"role": each.role, "content": each.content} for each in messages]
    if isinstance(completion, str):
        return Conversation((*before, {"role": ASSISTANT, "content": completion}), len(messages))
    added = before[: len(messages) - completion.first]
    return Conversation((*added, *completion.turns), len(messages), completion.tools)


def answer_of(value: object, prompt: object, tools: Json, column: str) -> str | Conversation | None:
    """Return a completion (a text or messages) as its text, if it is a single one, or with its prompt.

    None: it is neither. Raises BadRow: messages cannot be read.
    """
    said = [{"role": ASSISTANT, "content": value}] if isinstance(value, str) else value
    if not isinstance(said, list) or not said or not (is_assistants(said[0]) and is_assistants(said[-1])):
        return None
    turns, before = _turns(said, column), _turns(prompt, "the prompt") if isinstance(prompt, list) else ()
    is_plain = all(turn.keys() == {"role", "content"} for turn in (*before, *turns))
    if len(turns) == 1 and is_plain and not (tools and before):
        return str(turns[0]["content"]) or None
    if not before:
        raise BadRow(
            f"expected chat messages as the prompt of several messages, or tool calls, in {column!r}, found another: change "
            "data.prompt_field"
        )
    if any(turn["role"] == ASSISTANT and not turn["content"] and not turn.get(_CALLS) for turn in turns):
        raise BadRow(f"expected content or {_CALLS} in every message of the {ASSISTANT} in {column!r}, found neither")
    return Conversation((*before, *turns), len(before), tools)


def tools_of(row: Mapping[str, object]) -> Json:
    """Return the functions in a row's ``tools``, a list or JSON. Raises BadRow."""
    tools = plain(row.get("tools"), "tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except (ValueError, RecursionError) as error:
            raise BadRow(
                f"expected a list of functions, or it as JSON, in 'tools', found another text: {error}"
            ) from error
    if tools and not (isinstance(tools, list) and all(isinstance(_function(tool).get("name"), str) for tool in tools)):
        raise BadRow("expected a list of functions with a name in 'tools', found another value")
    return tools or None


def _turns(messages: list[object], column: str) -> tuple[Turn, ...]:
    turns = []
    for message in messages:
        turn = {str(name): plain(value, column) for name, value in _dict(message).items() if value is not None}
        content = turn.get("content", "" if turn.get(_CALLS) else None)
        if not isinstance(turn.get("role"), str) or not isinstance(content, str):
            raise BadRow(
                f"expected {{role, content}} as texts in {column!r}, or {_CALLS} instead of the content, found "
                f"{json.dumps(turn, default=str)[:60]}"
            )
        turns.append({"content": None, **turn})
    return tuple(turns)


class Reader:
    """``ends`` are the tokens that end a turn; ``end`` is written where a template writes none after the last."""

    def __init__(self, codec: TokenizerCodec, ends: Collection[int], end: int | None, most: int) -> None:
        self._codec, self._ends, self._end, self._most = codec, ends, end, most

    def encode(self, conversation: Conversation, prompt: Prompt) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return the tokens of the prompt and those after it, and the segments of these. Raises BadRow, PermanentError."""
        turns, texts = conversation.turns, _Texts(self._codec, conversation, prompt)
        whole = self._codec.tokens(texts.of(len(turns)))
        learned = [place for place in range(conversation.first, len(turns)) if turns[place]["role"] == ASSISTANT]
        if len(learned) > 1 and len(whole) > self._most:  # before each is rendered
            raise BadRow(
                f"expected a conversation of at most {self._most} tokens (the model's context), found {len(whole)}"
            )
        spans = [self._span(texts, place, whole) for place in learned]
        texts.check_given()
        start, stop = spans[0][0], spans[-1][1]
        ids = whole[start:stop]
        if stop == len(whole) and whole[-1] not in self._ends:
            ids += [self._end] if self._end is not None else []
        prompt_ids = self._codec.checked(prompt, whole[:start])
        return prompt_ids, np.array(ids, dtype=np.int32), _segments([(a - start, b - start) for a, b in spans])

    def _span(self, texts: "_Texts", place: int, whole: list[int]) -> tuple[int, int]:
        before, after = texts.of(place, add_generation_prompt=True), texts.of(place + 1)
        texts.check_turn(place, before, after)
        if (header := texts.header) and after.removeprefix(before).startswith(header):
            raise BadRow(
                f"expected a chat template whose generation prompt is before each message of the {ASSISTANT}, found none before "
                f"message {place + 1}: change policy.tokenizer"
            )
        begin, end = self._codec.tokens(before), self._codec.tokens(after)
        if whole[: len(end)] != end or end[: len(begin)] != begin or len(end) == len(begin):
            raise BadRow(
                "expected a chat template that renders an answered conversation as the prompt and what follows it, found "
                f"another beginning at message {place + 1}: change policy.tokenizer or data.chat_template, give earlier turns as "
                "the prompt (data.prompt_field) of the last one, or give prompt and completion as texts"
            )
        last = max((at for at in range(len(begin), len(end)) if end[at] in self._ends), default=len(end) - 1)
        while last > len(begin) and end[last - 1] in self._ends:
            last -= 1
        return len(begin), last + 1


class _Texts:
    """Renderings of a conversation's first turns."""

    def __init__(self, codec: TokenizerCodec, conversation: Conversation, prompt: Prompt) -> None:
        self._codec, self._conversation, self._prompt = codec, conversation, prompt

    def of(self, turns: int, *, add_generation_prompt: bool = False) -> str:
        said, tools = self._conversation.turns[:turns], self._conversation.tools
        return self._codec.conversation(said, self._prompt, add_generation_prompt=add_generation_prompt, tools=tools)

    @functools.cached_property
    def header(self) -> str:
        """The generation prompt after the prompt."""
        first = self._conversation.first
        return self.of(first, add_generation_prompt=True).removeprefix(self.of(first))

    def check_turn(self, place: int, before: str, after: str) -> None:
        """Raise BadRow unless the assistant's turn is rendered whole, and its text last."""
        turn, text = self._conversation.turns[place], self._codec.plain(after)
        content = self._codec.plain(str(turn["content"] or ""))
        added = self._codec.plain(after.removeprefix(before))
        is_whole = content in added if turn.get(_CALLS) else text.endswith(content)
        if not is_whole or not self._has(added, [turn.get(name) for name in _REASONING], _called(turn)):
            change = "puts text after it" if content in text and not is_whole else "leaves a part of it out"
            raise BadRow(
                f"expected a chat template that renders the {ASSISTANT}'s message as it is, and ends it with special tokens of "
                f"the tokenizer, but it {change}: change policy.tokenizer, or give prompt and completion as texts"
            )

    def check_given(self) -> None:
        """Raise BadRow unless the template renders every message that is given, and the tools."""
        turns, tools = self._conversation.turns, self._conversation.tools
        given = [(f"the {turn['role']}'s", turn["content"]) for turn in turns if turn["role"] != ASSISTANT]
        named: list[Json] = [_function(tool)["name"] for tool in tools] if isinstance(tools, list) else []
        whole = self._codec.plain(self.of(len(turns)))
        for owner, value in (*given, *(("its tools", name) for name in named)):
            if not self._has(whole, value):
                raise BadRow(
                    f"expected a chat template that renders every message of {self._prompt.problem}, but it leaves out {owner}: "
                    "use a tokenizer with another one (policy.tokenizer), or give prompts as texts"
                )

    def _has(self, text: str, *values: Json) -> bool:
        return all(any(self._codec.plain(form) in text for form in forms) for forms in _forms(list(values)))


def _segments(spans: Sequence[tuple[int, int]]) -> Int32Array:
    """Return the segments of a completion whose sampled tokens are ``spans``; of a single span none.

    >>> _segments([(0, 3), (5, 6)]).tolist()
    [[0, -1, 1], [3, 0, 0], [5, 1, 1]]
    """
    if len(spans) == 1:
        return no_segments()
    rows: list[tuple[int, int, int]] = []
    at = 0
    for start, end in spans:
        for first, is_sampled in ((at, 0), (start, 1)):
            if is_sampled or first < start:
                rows.append((first, len(rows) - 1, is_sampled))
        at = end
    return np.array(rows, dtype=np.int32)


def _called(turn: Turn) -> Json:
    """Return names and arguments of a turn's calls."""
    calls = turn.get(_CALLS)
    called: list[Json] = []
    for function in map(_function, calls if isinstance(calls, list) else [calls] if calls else []):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        called += [function.get("name"), arguments]
    return called


def _forms(value: Json) -> Iterator[tuple[str, ...]]:
    """Yield how each name and value in ``value`` can be written."""
    if isinstance(value, dict):
        yield from _forms([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _forms(each)
    elif isinstance(value, str):
        yield value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    elif value is not None:
        yield str(value), json.dumps(value)


def _function(value: object) -> dict[str, Any]:
    return _dict(_dict(value).get("function", value))


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def is_assistants(turn: object) -> bool:
    return bool(_dict(turn).get("role") == ASSISTANT)
