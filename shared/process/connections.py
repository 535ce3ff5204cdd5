"""Connections of an HTTP server, bounded in number, time and head size (docs/api.md, "Limits").

Those that have proven a token or key are counted apart from all others, so that a flood without one displaces only
itself.
"""

import asyncio
import contextlib
import dataclasses
import http
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.shared.peers.handshake import Newcomers

log = logging.getLogger(__name__)

_SILENT_S = 10
"""Seconds for which the kernel holds a connection that sends nothing: a busy client has time to send its token."""
_BACKLOG = 512
"""Connections that one turn of the event loop may accept: with those held, fewer than the usual 1,024 open files."""
_PROVEN = "penstock.proven"
"""Key of a request's scope: the function to call once the caller has proven a token."""
Refusal = Callable[[int, str], JSONResponse]
"""A status and why, as the server writes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionBounds:
    unproven: int = 128
    """Connections without a valid token; one more closes the oldest."""
    proven: int = 256
    """The others; one more closes the one whose last request is oldest."""
    head_bytes: int = 32 * 1024
    head_s: float = 10.0
    request_s: float = 30.0
    """From the end of the head to the end of the body."""
    unread_s: float = 30.0
    """Time for which an answer may stay unread."""


class Connections:
    def __init__(self, bounds: ConnectionBounds, refusal: Refusal) -> None:
        self.bounds, self.refusal = bounds, refusal
        self.unproven = Newcomers(bounds.unproven)
        self.proven = Newcomers(bounds.proven)

    async def serve(self, app: ASGIApp, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
        """Serve ``app`` until cancelled, then finish open requests; call ``ready`` once it answers."""
        server = _Quiet(self._config(app, listening), ready)
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)

    def _config(self, app: ASGIApp, listening: socket.socket) -> uvicorn.Config:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # clients' broken requests are not errors
        return uvicorn.Config(
            app,
            http=self._protocol,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=2,
        )

    def _protocol(self, **arguments: Any) -> asyncio.Protocol:
        return _Bounded(self, **arguments)


class _Quiet(uvicorn.Server):
    """Leaves signals to its process."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def note_proven(scope: Scope, among: Newcomers | None = None) -> None:
    """Count the request's connection as proven, the newest of those or ``among`` others; one too many closes the oldest."""
    prove = scope.get(_PROVEN)
    if prove is not None:
        prove(among)


class _Refused(Exception):
    """The request's head is too large."""


_LINGER_S = 1.0
"""Seconds to drain a refused connection: closing at once could lose the answer."""


class _Bounded(HttpToolsProtocol):
    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = connections
        self._among = connections.unproven
        self._cycles: list[RequestResponseCycle] = []
        """Requests whose answers are incomplete, and the last."""
        self._proven = False
        self._in_head = False
        self._refused = False
        self._head_bytes = 0
        """Bytes received of an incomplete head."""
        self._reading: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._among.enter(self, self._displaced)
        self._expect(self._all.bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unexpect()
        self.resume_writing()
        self._among.leave(self)
        self._disconnect()
        super().connection_lost(exc)

    def _prove(self, among: Newcomers | None) -> None:
        self._proven = True
        self._among.leave(self)
        self._among = self._all.proven if among is None else among
        self._among.enter(self, self._cut)

    def _displaced(self) -> None:
        """Close this connection, unless a request that has already arrived proves a token or is being answered.

        One turn of the loop reads what was sent before the connection was accepted, the next handles it: however many
        connections one turn accepts, each can prove itself. A probe needs no token: its connection is closed after
        its answer.
        """
        self.loop.call_soon(self.loop.call_soon, self._drop)

    def _drop(self) -> None:
        if self._proven:
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self._in_head:
            self._cut()
        else:
            cycle.keep_alive = False

    def eof_received(self) -> None:
        self._disconnect()

    def _cut(self) -> None:
        self._disconnect()
        self.transport.abort()

    def _disconnect(self) -> None:
        """Drop what handlers send from now on: to write to a transport that closes is an error.

        uvicorn does so later, and only for the last of several pipelined requests.
        """
        for cycle in self._cycles:
            if not cycle.response_complete:
                log.debug("client left before its answer", extra={"client": self.client})
                cycle.disconnected = True
                cycle.message_event.set()

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
        self.scope[_PROVEN] = self._prove  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._in_head = False
        if (
            len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            > self._all.bounds.head_bytes
        ):
            raise _Refused
        self._expect(self._all.bounds.request_s)
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]

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
            self._cut()
        elif cycle is None and not self._in_head:
            self.transport.close()
        else:
            self._refuse(408, "expected the whole request in time: send it faster")

    # ---------------------------------------------------------------- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._all.bounds.unread_s, self._cut)

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
        answer = self._all.refusal(status, detail)
        answer.headers["Connection"] = "close"
        phrase = http.HTTPStatus(status).phrase
        head = [f"HTTP/1.1 {status} {phrase}".encode(), *(name + b": " + value for name, value in answer.raw_headers)]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + bytes(answer.body))
        with contextlib.suppress(OSError):  # the client has already left
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
