"""Pages of the trimmed streams: steps, events, history, and the journal's newest group."""

from collections.abc import Mapping

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.streams import Row, Stream


async def page(bus: Bus, stream: Stream, before: str | None, count: int) -> list[Row]:
    """Return the newest entries before ``before``, newest first."""
    return await bus.xrevrange(stream, f"({before}" if before else "+", count=count)


async def newer(bus: Bus, stream: Stream, after: str, count: int) -> list[Row]:
    """Return the newest entries after ``after``, newest first."""
    return await bus.xrevrange(stream, start=f"({after}" if after else "-", count=count)


async def following(bus: Bus, stream: Stream, after: str, count: int) -> list[Row]:
    """Return the entries after ``after``, oldest first."""
    return await bus.xread({stream: after}, count)


async def wait_for_any(bus: Bus, after: Mapping[Stream, str], wait_s: float) -> None:
    await bus.xread(after, 1, wait_s)
