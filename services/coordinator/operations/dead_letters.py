"""Dead letters: what could not be handled, to look at, to try again, or to give up. Every change is one script, and counted.

::

    <stream>.dead ──▶ revive    back onto its stream, attempts forgotten      dead:<stream> − 1, in flight + 1
                  └─▶ discard   gone for good                                 dead:<stream> − 1, dropped:discarded + 1

So ``admitted = trained + dropped + dead + in flight`` still holds. A letter is named by its stream and its entry there.
"""

import dataclasses
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np

from shared.bus import streams, wire
from shared.bus.bus import Argument, Bus
from shared.bus.messages import Experience, Json, PolicyRecord, Prompt, RolloutGroup
from shared.bus.streams import Stream
from shared.errors import MessageError

_SHOWN_ELEMENTS = 256
_DISCARDED = "dropped:discarded"
ENTRY_PATTERN = r"^[0-9]{1,18}-[0-9]{1,18}$"


class DeadLetterSource(StrEnum):
    """A stream whose entries can be buried."""

    PROMPTS = "prompts"
    ROLLOUTS = "rollouts"
    EXPERIENCE = "experience"
    EVAL_PROMPTS = "eval_prompts"
    EVAL_ROLLOUTS = "eval_rollouts"
    EVAL_RESULTS = "eval_results"
    PUBLISHED = "published"


_STREAMS: dict[DeadLetterSource, Stream] = {DeadLetterSource(stream.name): stream for stream in streams.GROUPED_STREAMS}
_KINDS: dict[DeadLetterSource, type[Any]] = {
    DeadLetterSource.PROMPTS: Prompt,
    DeadLetterSource.ROLLOUTS: RolloutGroup,
    DeadLetterSource.EXPERIENCE: Experience,
    DeadLetterSource.EVAL_PROMPTS: Prompt,
    DeadLetterSource.EVAL_ROLLOUTS: RolloutGroup,
    DeadLetterSource.EVAL_RESULTS: Experience,
    DeadLetterSource.PUBLISHED: PolicyRecord,
}
CURSOR_PATTERN = f"^({'|'.join(DeadLetterSource)}):[0-9]{{1,18}}-[0-9]{{1,18}}$"


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """One entry that could not be handled."""

    stream: DeadLetterSource
    entry: str
    group: str
    reason: str
    attempts: int
    buried_at_s: float
    data: bytes

    @property
    def cursor(self) -> str:
        """Its place among all dead letters."""
        return f"{self.stream.value}:{self.entry}"


async def read_page(bus: Bus, after: str, limit: int, only: DeadLetterSource | None) -> list[DeadLetter]:
    """Return up to ``limit`` letters after a cursor (empty: the first), stream by stream, oldest first."""
    order = sorted(DeadLetterSource) if only is None else [only]
    stream, _, entry = after.partition(":")
    found: list[DeadLetter] = []
    for source in order:
        if after and source < stream:
            continue
        start = f"({entry}" if source == stream else "-"
        found += await _read(bus, source, start, "+", limit - len(found))
        if len(found) >= limit:
            break
    return found


async def read_one(bus: Bus, source: DeadLetterSource, entry: str) -> DeadLetter | None:
    """Return one letter."""
    found = await _read(bus, source, entry, entry, 1)
    return found[0] if found else None


async def newest_reason(bus: Bus, source: DeadLetterSource) -> str:
    """Return why the newest letter of a stream was given up; "" where there is none."""
    key = bus.keys.of(_STREAMS[source].dead)
    rows = await bus.call(lambda: bus.client.xrevrange(key, count=1))
    return _letter(source, rows[0][0].decode(), rows[0][1]).reason if rows else ""


async def _read(bus: Bus, source: DeadLetterSource, start: str, end: str, count: int) -> list[DeadLetter]:
    key = bus.keys.of(_STREAMS[source].dead)
    rows = await bus.call(lambda: bus.client.xrange(key, min=start, max=end, count=count))
    return [_letter(source, entry.decode(), fields) for entry, fields in rows]


def _letter(source: DeadLetterSource, entry: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        stream=source,
        entry=entry,
        group=fields.get(b"id", b"").decode(errors="replace"),
        reason=fields.get(b"reason", b"").decode(errors="replace"),
        attempts=int(fields.get(b"attempts", 0)),
        buried_at_s=int(entry.partition("-")[0]) / 1000,
        data=fields.get(b"data", b""),
    )


async def revive(bus: Bus, source: DeadLetterSource, entry: str) -> int:
    """Put a letter back onto its stream; return 1, 0 where it is gone, -1 where the run has ended."""
    stream = _STREAMS[source]
    keys = [bus.keys.of(stream.dead), bus.keys.of(stream), bus.keys.counts, bus.keys.run]
    return int(await bus.script("revive", keys, [entry, _counted(stream)]))


async def discard(bus: Bus, source: DeadLetterSource, entry: str, detail: str) -> bool:
    """Let a letter leave the run for good; False where it is gone."""
    stream = _STREAMS[source]
    keys = [bus.keys.of(stream.dead), bus.keys.counts, bus.keys.of(streams.AUDIT)]
    arguments: list[Argument] = [entry, _counted(stream), _DISCARDED, detail, bus.audit_entries]
    return bool(await bus.script("discard", keys, arguments))


def _counted(stream: Stream) -> str:
    return f"dead:{stream.name}" if stream in streams.TRAINING_STREAMS else ""


def decode(letter: DeadLetter) -> tuple[Json, str]:
    """Return the letter's message as JSON, arrays cut after 256 elements, and why it cannot be read ("": it can)."""
    try:
        return _shown(wire.decode(letter.data, _KINDS[letter.stream])), ""
    except MessageError as error:
        return None, str(error)


def _shown(value: object) -> Json:
    if dataclasses.is_dataclass(value):
        return {field.name: _shown(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        elements = np.nan_to_num(value.reshape(-1)[:_SHOWN_ELEMENTS]).tolist()
        return {"shape": list(value.shape), "elements": elements}
    if isinstance(value, Mapping):
        return {str(name): _shown(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(part) for part in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return re.sub(r"\s+", " ", repr(value))
