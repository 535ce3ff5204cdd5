"""Token ids to an answer: its text, reasoning and tool calls. What does not parse stays text, never an error."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.services.episodes.messages import Message, ToolCall, call, parse
from penstock.shared.bus.messages import Int32Array
from penstock.shared.model.tokenizer import TextDecoder, Tokenizer
from penstock.shared.reasoning import Reasoning

_OPENING, _CLOSING = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\}\s*</tool_call>")
MARKERS = ("<tool_call>", "</tool_call>")
_OPENING_TOKENS = 32


class AnswerParser:
    """Reads calls in Hermes form, ``<tool_call>{"name": …, "arguments": …}</tool_call>``, and answers that are one call in
    JSON, as Llama 3 writes them.

    Args:
        markers: of reasoning, closing by opening.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self._reasoning = Reasoning(markers)
        self._marks = sorted({*markers, *markers.values()}, key=len, reverse=True)
        self.decode = TextDecoder(tokenizer, (*MARKERS, *self._marks))
        self._numbers = itertools.count()

    def __call__(self, prompt_ids: Int32Array, answer_ids: Int32Array, *, has_tools: bool) -> Message:
        """Return the answer that was drawn after ``prompt_ids``."""
        (end,) = self._tokenizer.batch_decode([prompt_ids[-_OPENING_TOKENS:].tolist()], skip_special_tokens=False)
        whole = self._reasoning.opening(end) + self.decode([answer_ids])[0]
        text = self._reasoning.answer(whole)
        reasoning = whole[: len(whole) - len(text)] if whole.endswith(text) else ""
        for mark in self._marks:
            reasoning = reasoning.replace(mark, "")
        text, calls = self._calls(text) if has_tools else (text, ())
        return Message("assistant", text.strip("\n") if reasoning or calls else text, calls, reasoning.strip())

    def _calls(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        whole = self._call(text.strip())
        if whole is not None:
            return "", (whole,)
        calls, rest, end = list[ToolCall](), "", 0
        for start, written, after in _calls_in(text):
            if (made := self._call(written)) is not None:
                calls.append(made)
                rest, end = rest + text[end:start], after
        return rest + text[end:], tuple(calls)

    def _call(self, text: str) -> ToolCall | None:
        """Return the call that a text is, if it is one."""
        if not text.startswith("{"):
            return None
        try:
            value: Any = parse(text)
        except ValueError:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        made = call(str(value.get("name")), arguments, f"call_{next(self._numbers)}")
        if not isinstance(value.get("name"), str) or not isinstance(made.values, dict):
            return None  # chat templates read objects only
        return made


def _calls_in(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield where each call begins, its JSON, and where it ends. No text of a policy is read twice.

    >>> list(_calls_in("a <tool_call> {1}</tool_call>{2}"))
    [(2, '{1}', 29)]
    """
    at = 0
    while (opening := _OPENING.search(text, at)) and (closing := _CLOSING.search(text, opening.end())):
        yield opening.start(), text[opening.end() : closing.start() + 1], closing.end()
        at = closing.end()
