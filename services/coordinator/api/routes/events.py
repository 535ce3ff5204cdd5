"""Events over HTTP: a list, and server-sent events.

Event ids are entries, so ``Last-Event-ID`` resumes. Streams end after ``for_s``, before proxies cut them, and are
bounded in total and per address.
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from penstock.services.coordinator.api.dependencies import EntryCursor, Limit, Parts, Rows, soon, views_of
from penstock.services.coordinator.api.errors import RETRY_AFTER_S
from penstock.services.coordinator.schemas.resources import EventView, Page
from penstock.shared.bus.messages import Event
from penstock.shared.bus.streams import EVENTS

_BEAT_S = 10.0
_WAIT_S = 0.5
_AT_ONCE = 100

LastEvent = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        pattern=r"^[0-9]{1,15}-[0-9]{1,15}$",
        description="The last event received. Without it, the stream begins with the next event.",
    ),
]
_STREAMED_EVENT = {
    "type": "object",
    "description": "One server-sent event. `data` is an event as of GET /v1/events, as JSON text.",
    "properties": {
        "id": {"type": "string"},
        "event": {"type": "string"},
        "data": {"type": "string"},
        "retry": {"type": "integer"},
    },
}
Seconds = Annotated[
    float, Query(gt=0, le=3600, allow_inf_nan=False, description="Seconds after which the stream ends.")
]


@dataclasses.dataclass(slots=True)
class OpenStreams:
    total: int = 128
    each: int = 32
    open: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def enter(self, address: str) -> Callable[[], None]:
        """Count a stream; return the function that ends it.

        Raises:
            HTTPException: 503, too many streams.
        """
        if self.open.total() >= self.total or self.open[address] >= self.each:
            detail = (
                f"expected at most {self.total} event streams, {self.each} from one address, and the limit is reached"
            )
            raise HTTPException(503, f"{detail}: close one, or try again", {"Retry-After": str(RETRY_AFTER_S)})
        self.open[address] += 1
        return lambda: self._leave(address)

    def _leave(self, address: str) -> None:
        self.open[address] -= 1
        if not self.open[address]:
            del self.open[address]


class _Counted(StreamingResponse):
    def __init__(self, content: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


def event_list(rows: Rows) -> APIRouter:
    router = APIRouter(prefix="/v1/events", tags=["events"])

    @router.get("", operation_id="listEvents", summary="Events, newest first")
    async def events(cursor: EntryCursor = None, limit: Limit = 100) -> Page[EventView]:
        return await views_of(rows, EVENTS, Event, _view, cursor, limit)

    return router


def event_routes(parts: Parts) -> APIRouter:
    router, streams = event_list(parts.rows), OpenStreams()

    @router.get(
        "/stream",
        operation_id="streamEvents",
        summary="Event stream",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": _STREAMED_EVENT}}}},
    )
    async def stream(request: Request, last_event_id: LastEvent = None, for_s: Seconds = 600.0) -> StreamingResponse:
        newest: str = await soon(_newest(parts))
        leave = streams.enter(request.client.host if request.client else "")
        return _Counted(_stream(parts, last_event_id or newest, for_s), leave)

    return router


async def _newest(parts: Parts) -> str:
    rows = await parts.rows(EVENTS, None, 1)
    return rows[0][0] if rows else "0-0"


def _view(entry: str, event: Event) -> EventView:
    return EventView.model_validate({"id": entry, **dataclasses.asdict(event)})


async def _stream(parts: Parts, after: str, for_s: float) -> AsyncIterator[str]:
    until_s, beat_s = time.monotonic() + for_s, time.monotonic() + _BEAT_S
    yield "retry: 1000\n\n"
    while True:
        entries = await parts.bus.tail(EVENTS, Event, after, _AT_ONCE, None)
        for entry, event in entries:
            after = entry
            name, text = event.name.replace(" ", "_"), _view(entry, event).model_dump_json()
            yield f"id: {entry}\nevent: {name}\ndata: {text}\n\n"
        if (left_s := until_s - time.monotonic()) <= 0:
            return
        if entries:
            continue
        if time.monotonic() > beat_s:
            beat_s = time.monotonic() + _BEAT_S
            yield ": still here\n\n"
        await asyncio.sleep(min(left_s, _WAIT_S))
