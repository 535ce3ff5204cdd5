"""The messages of an episode, which its sample carries (``Sample.transcript``), by turn in the order of their drawing::

    {"turns": [{"after": null, "segment": 1, "messages": [question, answer], …},
               {"after": 0, "segment": 3, "messages": [observation, answer], …}]}

It is written where an episode is played, and read by scorers, records and pages.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.shared.bus.messages import Int32Array, Json, Sample
from penstock.shared.errors import PermanentError

Messages = list[dict[str, Any]]
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
    """The row of its tokens in ``Sample.segments``."""
    tokens: int
    versions: Sequence[int]
    seconds: float
    """Until it was drawn."""
    waited_s: float
    """Since the answer before it: of its tools, or its agent."""
    fork: str = ""
    """Why its history is a branch."""


def written(turns: Sequence[TranscribedTurn], metrics: Mapping[str, float]) -> bytes:
    """Return a transcript, with messages cut to what a sample may hold."""
    left, shown = _WRITTEN, list[dict[str, Any]]()
    for turn in turns:
        messages = list[dict[str, Any]]()
        for message in turn.messages:
            if left > 0 or message is turn.messages[-1]:
                kept, size = _kept(message, left)
                messages.append(kept)
                left -= size
        shown.append({**{name: getattr(turn, name) for name in _NAMES}, "messages": messages})
    return json.dumps({"turns": shown, **({"metrics": dict(metrics)} if metrics else {})}).encode()


def _kept(message: Mapping[str, Any], left: int) -> tuple[dict[str, Any], int]:
    """Return a message and its characters; only its text, cut, if they are more than ``left``."""
    kept = {name: value for name, value in message.items() if value or name == "role"}
    size = len(json.dumps(kept, ensure_ascii=False))
    if size <= left:
        return kept, size
    content, room = str(message.get("content") or ""), max(0, left - _EACH)
    told = f"{content[:room]}… ({len(content) - room} characters more)" if len(content) > room > 0 else content[:room]
    cut = {"role": str(message["role"])[:_EACH], "content": told}
    return cut, len(json.dumps(cut, ensure_ascii=False))


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """The last turn with those that it continues."""

    prompt: Messages
    """Before the first answer."""
    completion: Messages
    token_ids: Int32Array
    """From the first answer to the last."""
    turns: Sequence[tuple[Messages, Messages]]
    """What every turn of the episode saw, and its answer."""


def read(sample: Sample) -> Conversation | None:
    """Return the conversation of an episode; None: a completion. Raises PermanentError: another transcript."""
    if not sample.transcript:
        return None
    try:
        turns = json.loads(sample.transcript)["turns"]
        histories = _histories(turns)
        first = len(turns) - 1
        while (earlier := turns[first]["after"]) is not None:
            first = earlier
        start = len(histories[first]) - 1
        ids = _token_ids(sample, turns[first]["segment"], turns[-1]["segment"])
    except (TypeError, KeyError, IndexError, ValueError, RecursionError) as error:
        raise PermanentError(
            f"expected the messages of an episode's turns, found another transcript: {error}"
        ) from error
    seen = [(history[:-1], history[-1:]) for history in histories]
    return Conversation(histories[-1][:start], histories[-1][start:], ids, seen)


def _histories(turns: Sequence[Mapping[str, Any]]) -> list[Messages]:
    histories: list[Messages] = []
    for turn in turns:
        earlier = [] if turn["after"] is None else histories[turn["after"]]
        messages = [{"content": "", **message} for message in turn["messages"]]
        histories.append([*earlier, *messages])
    return histories


def _token_ids(sample: Sample, first: int, last: int) -> Int32Array:
    """Return the tokens up to the end of a segment that follow what is before another one."""
    starts = sample.segments[:, 0].tolist()
    ends = [*starts[1:], len(sample.token_ids)]
    before, path = (
        [sample.token_ids[starts[k] : ends[k]] for k in _path(sample.segments[:, 1].tolist(), segment)]
        for segment in (first, last)
    )
    return np.concatenate(path)[sum(map(len, before[:-1])) :]


def _path(parents: Sequence[int], segment: int) -> list[int]:
    path = [segment]
    while (segment := parents[segment]) >= 0:
        path.append(segment)
    return path[::-1]


def text(messages: Messages) -> str:
    """Return messages as text, calls as JSON."""
    parts = []
    for message in messages:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        parts.append(f"{message['role']}: " + "\n".join(filter(None, [message["content"], *calls])))
    return "\n\n".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """What an episode had; nothing if its transcript cannot be read."""

    calls: int = 0
    """Of tools."""
    waited_s: float = 0.0
    """Between its answers, for its tools or its agent."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of its environment, or agent."""


def tally(sample: Sample) -> Tally:
    """Return the sums over an episode's turns."""
    try:
        decoded = json.loads(sample.transcript or b'{"turns": []}')
        calls = sum(
            len(message.get("tool_calls") or ()) for turn in decoded["turns"] for message in turn["messages"][-1:]
        )
        waited_s = sum(float(turn.get("waited_s", 0.0)) for turn in decoded["turns"][1:])
        metrics = {str(name): float(value) for name, value in decoded.get("metrics", {}).items()}
        if not all(map(math.isfinite, (waited_s, *metrics.values()))):
            return Tally()
        return Tally(calls, waited_s, metrics)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Tally()


def turns_of(sample: Sample) -> list[Json]:
    """Return an episode's messages in the order of its turns, as records have them.

    Empty for a completion, and for a transcript that cannot be read.
    """
    try:
        turns = json.loads(sample.transcript or b'{"turns": []}')["turns"]
        places = np.cumsum(sample.segments[:, 2]) - 1  # among the sampled ones, each of which may have a reward
        rewards = dict(enumerate(sample.turn_rewards[places].tolist())) if len(sample.turn_rewards) else {}
        return [dict(entry) for entry in _entries(turns, rewards)]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        return []


def _entries(turns: Sequence[Mapping[str, Any]], rewards: Mapping[int, float]) -> Iterator[dict[str, Json]]:
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
    calls = [each["function"] for each in message.get("tool_calls", ())[:_EACH]]
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
