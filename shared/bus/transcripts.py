"""The messages of an episode, which its sample carries (``Sample.transcript``), by turn in the order of their drawing::

    {"turns": [{"after": null, "segment": 1, "messages": [question, answer], …},
               {"after": 0, "segment": 3, "messages": [observation, answer], …}]}

``after`` is the turn that a turn continues, ``segment`` the row of its tokens in ``Sample.segments``.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.shared.bus.messages import Int32Array, Sample
from penstock.shared.errors import PermanentError

Messages = list[dict[str, Any]]
_TOOLS = "tools"
"""The role of what stands for the tools in a history."""


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
        messages = [{"content": "", **message} for message in turn["messages"] if message["role"] != _TOOLS]
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
