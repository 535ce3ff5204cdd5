"""An episode's transcript: written where it is played, read for records and pages."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.shared.bus.messages import Json, Sample

_WRITTEN, _SHOWN = 1 << 20, 1 << 17
"""Characters of all messages of an episode: in its sample, and in records."""
_EACH = 100
"""Characters that a message costs beside its text."""


@dataclasses.dataclass(frozen=True, slots=True)
class TranscribedTurn:
    """One answer of the policy, the last of ``messages`` (as chat templates read them); the others were given."""

    messages: Sequence[Mapping[str, Any]]
    after: int | None
    """The turn that its history continues."""
    segment: int
    """Its place among the sample's sampled segments."""
    tokens: int
    versions: Sequence[int]
    seconds: float
    """Until it was drawn."""
    waited_s: float
    """Since the answer before it: of its tools, or its agent."""
    fork: str = ""
    """Why its history is a branch."""


def written(turns: Sequence[TranscribedTurn]) -> bytes:
    """Return a transcript, with messages cut to what a sample may hold."""
    left, shown = _WRITTEN, list[dict[str, Any]]()
    for turn in turns:
        messages = list[dict[str, Json]]()
        for message in turn.messages[:-1]:
            if left <= 0:
                break
            messages.append(_cut(message, left))
            left -= _size(messages[-1])
        messages.append(_cut(turn.messages[-1], left))
        left -= _size(messages[-1])
        shown.append({**{name: getattr(turn, name) for name in _NAMES}, "messages": messages})
    return json.dumps({"turns": shown}).encode()


def turns_of(sample: Sample) -> list[Json]:
    """Return an episode's messages in the order of its turns, as records have them.

    Empty for a completion, and for a transcript that cannot be read.
    """
    try:
        turns = json.loads(sample.transcript or b'{"turns": []}')["turns"]
        return [dict(entry) for entry in _entries(turns, sample.turn_rewards.tolist())]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []


def _entries(turns: Sequence[Mapping[str, Any]], rewards: Sequence[float]) -> Iterator[dict[str, Json]]:
    left = _SHOWN
    for number, turn in enumerate(turns):
        entries = list[dict[str, Json]]()
        for message in turn["messages"]:
            entries.append(_cut(message, left))
            left -= _size(entries[-1])
        *given, answer = entries
        for entry in given[:1]:
            entry["seconds"] = float(turn["waited_s"])
        for entry in (given or [answer])[:1]:
            entry |= {"fork": str(turn["fork"]), "after": turn["after"]} if turn["fork"] else {}
        answer |= {"turn": number, "tokens": int(turn["tokens"]), "versions": list(map(int, turn["versions"]))}
        answer |= {"seconds": float(turn["seconds"])} | ({"reward": rewards[turn["segment"]]} if rewards else {})
        yield from entries


def _cut(message: Mapping[str, Any], left: int) -> dict[str, Json]:
    """Return a message with ``left`` characters at most; nothing but its role where none are left."""
    cut: dict[str, Json] = {"role": str(message["role"])[:_EACH]}
    left = max(0, left)
    for name, text in (("content", message.get("content")), ("reasoning", message.get("reasoning_content"))):
        text = text or message.get(name)
        if text and left > 0:
            cut[name] = f"{text[:left]}… ({len(text) - left} characters more)" if len(text) > left else str(text)
            left -= len(text)
    calls = message.get("calls") or [each["function"] for each in message.get("tool_calls", ())[:_EACH]]
    made = list[Json]()
    for each in calls if left > 0 else ():
        made.append({"name": each["name"][:_EACH], "arguments": _arguments(each)[: max(0, left)]})
        left -= _EACH + len(_arguments(each))
    return {**cut, **({"calls": made} if made else {})}


def _arguments(call: Mapping[str, Any]) -> str:
    value = call["arguments"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _size(message: Mapping[str, Any]) -> int:
    """Return what a message takes of the characters of its episode."""
    calls = sum(_EACH + len(each["arguments"]) for each in message.get("calls", ()))
    return _EACH + calls + sum(len(message.get(name, "")) for name in ("content", "reasoning"))


_NAMES = tuple(field.name for field in dataclasses.fields(TranscribedTurn) if field.name != "messages")
