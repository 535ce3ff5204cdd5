"""What the dialects have in common: a question that was read, and how its answers are written."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import Counter

from penstock.services.episodes.episode import Answer
from penstock.services.episodes.messages import Message
from penstock.shared.bus.messages import Int32Array

IGNORED = Counter(
    "penstock_episodes_ignored_total",
    "Fields of requests that had no effect: the run decides how is sampled.",
    ["field"],
)
_REFUSED = ("logit_bias", "presence_penalty", "frequency_penalty", "response_format", "previous_response_id")
"""They would change which tokens can be drawn, or need what is not kept."""
_IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "tool_choice",
    "parallel_tool_calls",
    "logprobs",
    "reasoning_effort",
)
MOST_ANSWERS = 16
_MOST_STOPS, _LONGEST_STOP = 8, 256
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class BadRequest(ValueError):
    """The request cannot be answered; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    answers: int = 1
    stream: bool = False
    token_ids: Int32Array | None = None
    """Instead of messages."""


class Dialect(Protocol):
    def read(self, body: Mapping[str, Any]) -> Question:
        """Raises BadRequest."""

    def write(self, answers: Sequence[Answer], model: str) -> dict[str, Any]: ...

    def stream(self, answers: Sequence[Answer], model: str) -> Iterable[tuple[str, Any]]:
        """Yield events as (name, or "", and data)."""


def check(body: Mapping[str, Any], refused: Sequence[str] = (), ignored: Sequence[str] = ()) -> None:
    """Refuse what would change the distribution, and count what is ignored. Raises BadRequest."""
    for name in (*_REFUSED, *refused):
        value = body.get(name)
        if value and not (name == "response_format" and value == {"type": "text"}):
            raise BadRequest(f"expected no {name}, which would change what the policy can draw: leave it out")
    for name in (*_IGNORED, *ignored):
        if body.get(name) is not None:
            IGNORED.labels(name).inc()


def of(kind: type[Any], body: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a field of a kind, or ``default`` if it is missing or null. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(f"expected {name} as {kind.__name__}, found {type(value).__name__}")
    return value


def count(body: Mapping[str, Any], *names: str, most: int = 1 << 30) -> int | None:
    """Return the first of several fields that is a positive number. Raises BadRequest."""
    for name in names:
        if (value := of(int, body, name)) is not None:
            if not 1 <= value <= most:
                raise BadRequest(f"expected {name} from 1 to {most}, found {value}")
            return int(value)
    return None


def stops(value: Any) -> tuple[str, ...]:
    """Raises BadRequest."""
    texts = (
        (value,) if isinstance(value, str) else tuple(value or ()) if isinstance(value, (list, type(None))) else None
    )
    if (
        texts is None
        or len(texts) > _MOST_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP for text in texts)
    ):
        raise BadRequest(
            f"expected at most {_MOST_STOPS} stop texts of at most {_LONGEST_STOP} characters, found others"
        )
    return texts


def text_of(content: Any) -> str:
    """Return the text of a content, of which parts are joined. Raises BadRequest: it has something else, such as an image."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"expected text as content, found {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRequest(f"expected text as content, found {str(kind)[:100]}")
        texts.append(text)
    return "".join(texts)


def role_of(body: Mapping[str, Any]) -> str:
    """Raises BadRequest."""
    role = ROLES.get(str(body.get("role")))
    if role is None:
        raise BadRequest(f"expected a role of {', '.join(ROLES)}, found {str(body.get('role'))[:100]!r}")
    return role


def maps(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Return a list of objects. Raises BadRequest."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise BadRequest(f"expected a list of objects as {name}, found others")
    return value


def function(tool: Mapping[str, Any], parameters: str = "parameters") -> dict[str, Any]:
    """Return a tool's description as chat templates read it. Raises BadRequest."""
    name = of(str, tool, "name", "")
    if not name:
        raise BadRequest("expected functions with a name as tools, found others")
    described = {"name": name, "description": of(str, tool, "description", "")}
    return {"type": "function", "function": {**described, "parameters": of(dict, tool, parameters, {})}}


def tokens(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the tokens of the prompt and of the answers."""
    return answers[0].prompt_tokens, sum(len(answer.drawn.token_ids) for answer in answers)
