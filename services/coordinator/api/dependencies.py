"""Route dependencies and pagination."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Query

from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.api.errors import ANSWER_WITHIN_S
from penstock.services.coordinator.operations.operations import Operations
from penstock.services.coordinator.policies.exports import Exporting
from penstock.services.coordinator.policies.rollback import Rollbacks
from penstock.services.coordinator.run.commands import Steering
from penstock.services.coordinator.run.monitor import Monitor
from penstock.services.coordinator.schemas.resources import Page
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.run import records
from penstock.shared.bus.streams import JOURNAL, Row, Stream
from penstock.shared.errors import MessageError
from penstock.shared.process.telemetry import Status

Rows = Callable[[Stream, str | None, int], Awaitable[list[Row]]]
"""Return the newest entries of a stream before one (None: of all), newest first: of a bus, or of a run's folder."""
M = TypeVar("M")
R = TypeVar("R")
T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=500, description="Maximum number of items.")]
ENTRY = r"^[1-9][0-9]{0,14}-[0-9]{1,15}$"
EntryCursor = Annotated[str | None, Query(pattern=ENTRY, description="`next` of the page before.")]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """``folder`` holds the records; ``changed`` is called after each change of the run."""

    bus: Bus
    ledger: Ledger
    live: Live
    monitor: Monitor
    operations: Operations
    steering: Steering
    rollbacks: Rollbacks
    exporting: Exporting
    access: Access
    status: Status
    folder: Path
    changed: Callable[[], None]

    async def rows(self, stream: Stream, cursor: str | None, count: int) -> list[Row]:
        return await records.page(self.bus, stream, cursor, count)

    async def trained(self, cursor: str | None, count: int) -> list[Row]:
        """Return entries of the journal with their groups."""
        return await records.with_payloads(self.bus, await self.rows(JOURNAL, cursor, count))

    async def newest_first(self, stream: Stream, cursor: str | None, limit: int) -> list[tuple[str, dict[str, str]]]:
        """``limit`` entries before a cursor, plus one if there are more."""
        return [
            (entry, {name.decode(): value.decode(errors="replace") for name, value in fields.items()})
            for entry, fields in await self.rows(stream, cursor, limit + 1)
        ]


async def soon(work: Awaitable[R]) -> R:
    async with asyncio.timeout(ANSWER_WITHIN_S):
        return await work


async def views_of(
    rows: Rows, stream: Stream, kind: type[M], view: Callable[[str, M], T], cursor: str | None, limit: int
) -> Page[T]:
    """Return a page of a stream's messages, as ``view`` shows an entry's; those of a newer version are skipped."""
    page, items = page_of(await soon(rows(stream, cursor, limit + 1)), limit, lambda row: row[0]), list[T]()
    for entry, fields in page.items:
        with contextlib.suppress(MessageError):
            items.append(view(entry, wire.decode(fields.get(b"data", b""), kind)))
    return Page(items=items, next=page.next)


def page_of(entries: Sequence[T], limit: int, cursor: Callable[[T], str]) -> Page[T]:
    items = list(entries[:limit])
    return Page(items=items, next=cursor(items[-1]) if len(entries) > limit else None)
