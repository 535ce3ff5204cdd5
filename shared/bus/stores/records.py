"""The trimmed streams, which people read: steps, events, history, and the journal's newest group."""

from collections.abc import Mapping

from shared.bus.bus import Bus
from shared.bus.streams import Row, Stream


async def page(bus: Bus, stream: Stream, before: str | None, count: int) -> list[Row]:
    """Return the newest entries of a stream, newest first; with ``before`` those older than that entry."""
    return await bus.xrevrange(stream, f"({before}" if before else "+", count=count)


async def newer(bus: Bus, stream: Stream, after: str, count: int) -> list[Row]:
    """Return the newest entries of a stream that are newer than ``after`` ("": any), newest first."""
    return await bus.xrevrange(stream, start=f"({after}" if after else "-", count=count)


async def following(bus: Bus, stream: Stream, after: str, count: int) -> list[Row]:
    """Return the entries of a stream that follow ``after``, oldest first."""
    return await bus.xread({stream: after}, count)


async def wait_for_any(bus: Bus, after: Mapping[Stream, str], wait_s: float) -> None:
    """Return when one of several streams has an entry after these, or after ``wait_s``."""
    await bus.xread(after, 1, wait_s)
