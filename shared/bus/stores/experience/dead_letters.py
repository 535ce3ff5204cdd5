"""Dead letters: list, revive, discard. Every change is one script, and counted.

::

    <stream>.dead ──▶ revive    back onto its stream, attempts forgotten      dead:<stream> − 1, in flight + 1
                  └─▶ discard   gone for good                                 dead:<stream> − 1, dropped:discarded + 1

``admitted = trained + dropped + dead + in flight`` still holds. Stream and entry identify a letter.
"""

import dataclasses
from collections.abc import Iterable
from enum import StrEnum

from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import ASSEMBLY
from penstock.shared.bus.streams import Row, Stream

_DISCARDED = "dropped:discarded"
_LONGEST_ID, _LONGEST_REASON = 100, 2000
ENTRY_PATTERN = r"^[0-9]{1,18}-[0-9]{1,18}$"


class DeadLetterSource(StrEnum):
    """A stream whose entries can be buried."""

    PROMPTS = "prompts"
    EPISODES = "episodes"
    ROLLOUTS = "rollouts"
    EXPERIENCE = "experience"
    EVAL_PROMPTS = "eval_prompts"
    EVAL_EPISODES = "eval_episodes"
    EVAL_ROLLOUTS = "eval_rollouts"
    EVAL_RESULTS = "eval_results"
    PUBLISHED = "published"


_STREAMS: dict[DeadLetterSource, Stream] = {DeadLetterSource(stream.name): stream for stream in streams.GROUPED_STREAMS}
CURSOR_PATTERN = f"^({'|'.join(DeadLetterSource)}):[0-9]{{1,18}}-[0-9]{{1,18}}$"


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead-letter entry."""

    stream: DeadLetterSource
    entry: str
    group: str
    reason: str
    attempts: int
    buried_at_s: float
    data: bytes

    @property
    def cursor(self) -> str:
        """Position among all dead letters."""
        return f"{self.stream.value}:{self.entry}"


async def read_page(bus: Bus, after: str, limit: int, only: DeadLetterSource | None) -> list[DeadLetter]:
    """Return up to ``limit`` letters after a cursor ("": all), by stream, oldest first."""
    order = sorted(DeadLetterSource) if only is None else [only]
    stream, _, entry = after.partition(":")
    letters: list[DeadLetter] = []
    for source in order:
        if after and source < stream:
            continue
        start = f"({entry}" if source == stream else "-"
        letters += await _read(bus, source, start, "+", limit - len(letters))
        if len(letters) >= limit:
            break
    return letters


async def read_one(bus: Bus, source: DeadLetterSource, entry: str) -> DeadLetter | None:
    letters = await _read(bus, source, entry, entry, 1)
    return letters[0] if letters else None


async def newest_reason(bus: Bus, sources: Iterable[DeadLetterSource] = DeadLetterSource) -> str:
    """Return the reason of the newest letter of ``sources``, or ""."""
    letters = [
        _letter(source, row) for source in sources for row in await bus.xrevrange(_STREAMS[source].dead, count=1)
    ]
    return max(letters, key=lambda letter: letter.buried_at_s).reason if letters else ""


async def _read(bus: Bus, source: DeadLetterSource, start: str, end: str, count: int) -> list[DeadLetter]:
    return [_letter(source, row) for row in await bus.xrange(_STREAMS[source].dead, start, end, count)]


def _letter(source: DeadLetterSource, row: Row) -> DeadLetter:
    entry, fields = row
    return DeadLetter(
        stream=source,
        entry=entry,
        group=fields.get(b"id", b"")[:_LONGEST_ID].decode(errors="replace"),
        reason=fields.get(b"reason", b"")[:_LONGEST_REASON].decode(errors="replace"),
        attempts=max(0, streams.count_in(fields, b"attempts")),
        buried_at_s=int(entry.partition("-")[0]) / 1000,
        data=fields.get(b"data", b""),
    )


async def revive(bus: Bus, source: DeadLetterSource, entry: str) -> int:
    """Put a letter back onto its stream, or its group onto ``prompts``; return 1, 0 if gone, -1 if the run has ended."""
    stream, letter = _STREAMS[source], await read_one(bus, source, entry)
    revived = await bus.script(
        "revive", dead=stream.dead, stream=stream, entry_id=entry, counted=_counted(stream),
        assembly=ASSEMBLY.of(letter.group if letter else ""),
    )  # fmt: skip
    return int(revived)


async def discard(bus: Bus, source: DeadLetterSource, entry: str, detail: str) -> bool:
    """Drop a letter; False if gone."""
    stream = _STREAMS[source]
    discarded = await bus.script(
        "discard", dead=stream.dead, entry_id=entry, counted=_counted(stream), outcome=_DISCARDED, detail=detail,
        audit_entries=bus.audit_entries,
    )  # fmt: skip
    return bool(discarded)


def _counted(stream: Stream) -> str:
    return f"dead:{stream.name}" if stream in streams.TRAINING_STREAMS else ""
