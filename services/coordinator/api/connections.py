"""Connections of the HTTP API, bounded in number, time and head size (docs/api.md, "Limits")."""

import asyncio
import collections
import dataclasses
import http
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.coordinator.api.errors import RETRY_AFTER_S, problem


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionBounds:
    connections: int = 512
    connections_each: int = 256
    head_bytes: int = 32 * 1024
    head_s: float = 10.0
    request_s: float = 30.0
    """From the end of the head to the end of the body."""
    unread_s: float = 30.0
    """Time for which an answer may stay unread."""


class Connections:
    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self._by_address: collections.Counter[str] = collections.Counter()

    def protocol(self, **arguments: Any) -> asyncio.Protocol:
        return _Bounded(self, **arguments)

    def enter(self, address: str) -> bool:
        """Return whether the connection is allowed; count it."""
        fits = self._by_address.total() < self.bounds.connections
        fits = fits and self._by_address[address] < self.bounds.connections_each
        self._by_address[address] += fits
        return fits

    def leave(self, address: str) -> None:
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class _Refused(Exception):
    """The request's head is too large."""


_LINGER_S = 1.0
"""Seconds to drain a refused connection: closing at once could lose the answer."""
_TOO_MANY: Final = (
    "expected at most {} connections, {} from one address; the limit is reached: close some, or try again"
)


class _Bounded(HttpToolsProtocol):
    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = connections
        self._address: str | None = None
        self._in_head = False
        self._refused = False
        self._head_bytes = 0
        """Bytes received of an incomplete head."""
        self._reading: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address, bounds = self.client[0] if self.client else "", self._all.bounds
        if self._all.enter(address):
            self._address = address
            self._expect(bounds.head_s)
        elif len(self.connections) > 2 * bounds.connections:
            transport.abort()
        else:
            self._refuse(503, _TOO_MANY.format(bounds.connections, bounds.connections_each))

    def connection_lost(self, exc: Exception | None) -> None:
        self._unexpect()
        self.resume_writing()
        if self._address is not None:
            self._all.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    # ---------------------------------------------------------------- reading

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._reading is None:
            self._expect(self._all.bounds.head_s)
        began = self._in_head
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if began and self._in_head else 0
        if self._head_bytes > self._all.bounds.head_bytes:
            self._refuse(431, self._too_large())

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if (
            len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            > self._all.bounds.head_bytes
        ):
            raise _Refused
        self._expect(self._all.bounds.request_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._unexpect()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers or [])
        if self.headers is not None and size > self._all.bounds.head_bytes:
            self._refuse(431, self._too_large())
        else:
            self._refuse(400, "could not read this request as HTTP/1.1")

    def _too_large(self) -> str:
        return f"expected a request line and headers of at most {self._all.bounds.head_bytes} bytes: send fewer or shorter ones"

    def _expect(self, seconds: float) -> None:
        self._unexpect()
        self._reading = self.loop.call_later(seconds, self._late)

    def _unexpect(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _late(self) -> None:
        self._reading = None
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
        elif cycle is None and not self._in_head:
            self.transport.close()
        else:
            self._refuse(408, "expected the whole request in time: send it faster")

    # ---------------------------------------------------------------- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._all.bounds.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _refuse(self, status: int, detail: str) -> None:
        self._unexpect()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
        answer = problem(status, detail, {**headers, "Connection": "close"})
        phrase = http.HTTPStatus(status).phrase
        head = [f"HTTP/1.1 {status} {phrase}".encode(), *(name + b": " + value for name, value in answer.raw_headers)]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + bytes(answer.body))
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
