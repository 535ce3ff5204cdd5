"""Canonical chat messages, by which a request's history is compared with what was sent before.

Text parts are joined, the arguments of tool calls are JSON values; call ids, names of tool messages and key order are
ignored. Reasoning is compared only if both sides have it: most clients do not send it back.
"""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; ``arguments`` is JSON with sorted keys, or what the policy wrote instead."""

    name: str
    arguments: str
    id: str = dataclasses.field(default="", compare=False)

    @property
    def values(self) -> Any:
        """The arguments as a JSON value; the text itself if it is not JSON."""
        try:
            return parse(self.arguments)
        except ValueError:
            return self.arguments


def parse(text: str) -> Any:
    """Return a JSON value. Raises ValueError: it is not JSON, or nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def call(name: str, arguments: object, call_id: str = "") -> ToolCall:
    """Return a call whose arguments are a JSON value, or its text."""
    try:
        value = parse(arguments) if isinstance(arguments, str) else arguments
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        text = str(arguments)
    return ToolCall(writable(name), writable(text), call_id)


def writable(text: str) -> str:
    """Return what has UTF-8: JSON may spell half of a surrogate pair."""
    return text.encode(errors="replace").decode()


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """Empty: not sent."""
    call_id: str = ""
    """Of a tool message: the call that it answers."""
    name: str = ""

    def is_same(self, other: "Message") -> bool:
        """Whether both are the same message of a conversation."""
        texts = [message.text if message.text.strip() else "" for message in (self, other)]
        reasoned = not (self.reasoning and other.reasoning) or self.reasoning.strip() == other.reasoning.strip()
        return self.role == other.role and texts[0] == texts[1] and self.calls == other.calls and reasoned

    def for_template(self, *, as_text: bool = False) -> dict[str, Any]:
        """Return the message as chat templates read it; ``as_text``: with the arguments of calls as JSON text."""
        written: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning:
            written["reasoning_content"] = self.reasoning
        if self.calls:
            written["tool_calls"] = [
                {
                    "id": made.id,
                    "type": "function",
                    "function": {"name": made.name, "arguments": made.arguments if as_text else made.values},
                }
                for made in self.calls
            ]
        if self.role == "tool":
            written |= {"tool_call_id": self.call_id, "name": self.name}
        return written
