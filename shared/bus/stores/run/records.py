"""Pages of the trimmed streams: steps, events, history, and the journal's groups."""

import contextlib
from collections.abc import Mapping, Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.streams import Row, Stream
from penstock.shared.errors import ShelfLost


async def page(bus: Bus, stream: Stream, before: str | None, count: int) -> list[Row]:
    """Return the newest entries before ``before``, newest first; the journal's as they are (:func:`with_payloads`)."""
    return await bus.xrevrange(stream, f"({before}" if before else "+", count=count)


async def with_payloads(bus: Bus, journal: Sequence[Row]) -> list[Row]:
    """Return rows of the journal with their groups as ``data``, unless they left it meanwhile, or no copy of theirs is left.
    Those of older releases have it already.
    """
    payloads = await bus.payloads([fields[b"entry"].decode() for _, fields in journal if b"entry" in fields])
    rows: list[Row] = []
    for row, fields in journal:
        if (data := payloads.get(fields.get(b"entry", b"").decode())) is not None:
            with contextlib.suppress(ShelfLost):
                fields = {**fields, b"data": await bus.whole(data)}
        rows.append((row, fields))
    return rows


async def newer(bus: Bus, stream: Stream, after: str, count: int) -> list[Row]:
    """Return the newest entries after ``after``, newest first."""
    return await bus.xrevrange(stream, start=f"({after}" if after else "-", count=count)


async def following(bus: Bus, stream: Stream, after: str, count: int) -> list[Row]:
    """Return the entries after ``after``, oldest first."""
    return await bus.xread({stream: after}, count)


async def wait_for_any(bus: Bus, after: Mapping[Stream, str], wait_s: float) -> None:
    await bus.xread(after, 1, wait_s)
