"""Token ids to an answer: its text, reasoning and tool calls. What does not parse stays text, never an error."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from penstock.services.episodes.messages import Message, ToolCall, call, parse
from penstock.shared.bus.messages import Int32Array
from penstock.shared.model.tokenizer import TextDecoder, Tokenizer
from penstock.shared.reasoning import Reasoning

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
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
        for match in _CALL.finditer(text):
            if (made := self._call(match[1])) is not None:
                calls.append(made)
                rest, end = rest + text[end : match.start()], match.end()
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
