"""Checks that apply to every request.

::

    X-Request-Id ─▶ Host (400, 421) ─▶ token (401, 403; the page needs none) ─▶ Origin (403) ─▶ Accept (406)
                 ─▶ route (404, 405) ─▶ body (408, 413, 415, 503) ─▶ Idempotency-Key (409, 422) ─▶ answer

Without a token or a route, nothing is written and no body is read. A POST with an ``Idempotency-Key``
(draft-ietf-httpapi-idempotency-key-header) runs once; its answer is kept for a day.
"""

import asyncio
import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.services.coordinator.api.auth import Access, Role
from penstock.services.coordinator.api.bodies import Bodies, BodyRefused
from penstock.services.coordinator.api.errors import ANSWER_WITHIN_S, bus_away, problem
from penstock.services.coordinator.api.routes.page import REPORT_PATH, SESSION_PATH, page_type, session_cookie
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.run.idempotency import begin_answer, forget_answer, keep_answer
from penstock.shared.errors import BusUnavailable
from penstock.shared.process.connections import note_proven

log = logging.getLogger(__name__)

REQUESTS = Counter("penstock_coordinator_requests_total", "HTTP requests answered, by status.", ["status"])
REQUEST_SECONDS = Histogram(
    "penstock_coordinator_request_seconds",
    "Seconds from a request's arrival to the start of its answer.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0),
)

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""For kubelets and load balancers, without token."""
STREAM_PATH: Final = "/v1/events/stream"
_OFFERED = {STREAM_PATH: "text/event-stream", REPORT_PATH: "text/html"}
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")
_IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,255}")
_BODY_TYPES = {"/v1/runs": ("application/toml",)}
_JSON_TYPES = ("application/json", "application/merge-patch+json")


class Conventions:
    def __init__(self, app: ASGIApp, access: Access, run_id: str, bus: Bus | None, routes: Sequence[BaseRoute]) -> None:
        """``bus``: where answers of repeated requests are kept; None: they are not."""
        self._app = app
        self._access = access
        self._run_id = run_id
        self._bus = bus
        self._routes = routes
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "HEAD":
            await self._answer({**scope, "method": "GET"}, receive, _HeadOnly(send))
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        answering = _Answering(send, scope, request_id)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, answering)
        elif not self._has_route(scope):
            await self._app(scope, receive, answering)
        else:
            await self._with_body(scope, receive, answering, headers)

    def _has_route(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes)

    async def _with_body(self, scope: Scope, receive: Receive, send: "_Answering", headers: Headers) -> None:
        try:
            async with self._bodies.read(receive) as body:
                wrong = _wrong_type(scope, headers) if body else None
                key = headers.get("idempotency-key")
                if wrong is not None:
                    await wrong(scope, receive, send)
                elif scope["method"] == "POST" and key is not None and self._bus and not _is_open(scope["path"]):
                    await self._once(self._bus, key, body, scope, receive, send)
                else:
                    await self._app(scope, _replayed(body, receive), send)
        except BodyRefused as refused:
            await refused.answer(scope, receive, send)
        except ClientDisconnect:
            log.debug("client left before its request was whole", extra={"path": scope["path"]})

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        path, reads = scope["path"], scope["method"] in _READING
        if (misdirected := self._host_refusal(path, headers.getlist("host"))) is not None:
            return misdirected
        page = page_type(path)
        if not _is_open(path):
            authorization = headers.get("authorization", "")
            cookie = HTTPConnection(scope).cookies.get(session_cookie(self._run_id), "")
            role = self._access.role(authorization, cookie)
            if role is None:
                sent = "another" if authorization else "none"
                detail = f"expected a bearer token of this coordinator, found {sent}: send Authorization: Bearer TOKEN"
                return problem(401, detail, {"WWW-Authenticate": 'Bearer realm="penstock"'})
            if role is Role.READ and not reads:
                return problem(403, f"expected a token that may operate for {scope['method']}, found one that may read")
            note_proven(scope)
        origin = headers.get("origin")
        if not reads and origin is not None and not self._is_own(origin, scope["scheme"], headers.get("host", "")):
            return problem(403, f"expected a request of this origin, found {origin}")
        offered = page or _OFFERED.get(path, "application/json")
        if not accepts(headers.get("accept", "*/*"), offered):
            return problem(406, f"this path answers {offered}, which does not match Accept: {headers['accept']}")
        return None

    def _host_refusal(self, path: str, hosts: list[str]) -> Response | None:
        """Refuse DNS rebinding; only HTTP/1.0 probes may omit the host."""
        if not hosts and path in OPEN_PATHS:
            return None
        if len(hosts) != 1:
            return problem(400, f"expected one Host header, found {len(hosts)}: send one")
        if not self._access.admits(hosts):
            detail = f"expected a loopback address or localhost as Host without a token, found {hosts[0]!r}"
            return problem(421, f"{detail}: set coordinator.token_file to serve other names")
        return None

    def _is_own(self, origin: str, scheme: str, host: str) -> bool:
        """Return whether ``origin`` is this page; with a token, a proxy may terminate TLS."""
        schemes = ("http", "https") if self._access.operate else (scheme,)
        return origin in [f"{each}://{host}" for each in schemes]

    # ---------------------------------------------------------------- once

    async def _once(self, bus: Bus, key: str, body: bytes, scope: Scope, receive: Receive, send: "_Answering") -> None:
        if _IDEMPOTENCY_KEY.fullmatch(key) is None:
            refusal = problem(422, "expected an Idempotency-Key of 1 to 255 printable characters")
            await refusal(scope, receive, send)
            return
        request = f"{scope['method']} {scope['path']}\n".encode()
        name = hashlib.sha256(request + key.encode()).hexdigest()
        mark = hashlib.sha256(request + body).hexdigest()
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                kept = await _take(bus, name, mark)
        except (TimeoutError, BusUnavailable):
            await bus_away()(scope, receive, send)
            return
        if kept is not None:
            await kept(scope, receive, send)
            return
        copy = _Copy(send)
        try:
            await self._app(scope, _replayed(body, receive), copy)
        finally:
            await _keep(bus, name, mark, copy)


async def _take(bus: Bus, name: str, mark: str) -> Response | None:
    """Reserve ``name``, or return its kept answer."""
    text = await begin_answer(bus, name, json.dumps({"mark": mark}))
    if text is None:
        return None
    kept: dict[str, Any] = json.loads(text) if text else {"mark": mark}
    if kept["mark"] != mark:
        return problem(422, "this Idempotency-Key was first used with another request body: use a new key")
    if "status" not in kept:
        return problem(409, "a request with this Idempotency-Key is in progress: wait")
    return Response(kept["body"].encode(), kept["status"], {**kept["headers"], "Idempotency-Replayed": "true"})


async def _keep(bus: Bus, name: str, mark: str, copy: "_Copy") -> None:
    """Keep an answer for a day, unless it failed or is truncated."""
    if not copy.whole or copy.status >= 500:
        await forget_answer(bus, name)
        return
    kept = {"mark": mark, "status": copy.status, "headers": copy.headers, "body": copy.body.decode()}
    await keep_answer(bus, name, json.dumps(kept))


def _is_open(path: str) -> bool:
    """Return whether ``path`` needs no token."""
    return path in OPEN_PATHS or path == SESSION_PATH or page_type(path) is not None


class _Answering:
    def __init__(self, send: Send, scope: Scope, request_id: str) -> None:
        self._send = send
        self._scope = scope
        self._id = request_id
        self._since_s = time.perf_counter()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self._id.encode())]
            seconds, status = time.perf_counter() - self._since_s, message["status"]
            REQUESTS.labels(str(status)).inc()
            REQUEST_SECONDS.observe(seconds)
            method, path = self._scope["method"], self._scope["path"]
            level = logging.DEBUG if method in _READING and status < 500 else logging.INFO
            log.log(level, "request", extra={"request": self._id, "method": method, "path": path, "status": status})
        await self._send(message)


class _HeadOnly:
    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._send(message)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class _Copy:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 500
        self.headers: dict[str, str] = {}
        self.body = b""
        self.whole = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kept = (b"content-type", b"location", b"etag", b"retry-after")
            self.headers = {name.decode(): value.decode() for name, value in message["headers"] if name in kept}
        else:
            self.body += message.get("body", b"")
            self.whole = not message.get("more_body", False)
        await self._send(message)


def _replayed(body: bytes, receive: Receive) -> Receive:
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _wrong_type(scope: Scope, headers: Headers) -> Response | None:
    expected = _BODY_TYPES.get(scope["path"], _JSON_TYPES)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in expected:
        return None
    return problem(415, f"expected a body of {' or '.join(expected)}, found {content_type or 'none named'}")


def accepts(accept: str, offered: str) -> bool:
    """Return whether an Accept header admits ``offered``.

    >>> accepts("text/html, application/*;q=0.5", "application/json"), accepts("text/html", "application/json")
    (True, False)
    """
    fitting = {"*/*", f"{offered.partition('/')[0]}/*", offered}
    for choice in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in choice.split(";"))
        refused = any(re.fullmatch(r"q=0(\.0{0,3})?", parameter) for parameter in parameters)
        if (kind in fitting or not kind) and not refused:
            return True
    return False
