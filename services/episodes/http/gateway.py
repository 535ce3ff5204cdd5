"""The endpoint: a key for each episode, good for turns of that episode alone, while it runs.

::

    POST /v1/chat/completions   POST /v1/messages, /v1/messages/count_tokens   POST /v1/responses   GET /v1/models
    POST /inference/v1/generate

The key is an ``Authorization: Bearer`` or an ``x-api-key``. It sets no reward: outcomes travel between the service and its
own processes. A retry of the same request, by ``Idempotency-Key`` or as SDKs mark it, gets the same answer. An episode that
has had its turns answers nothing, cut at its length. Connections without a key displace one another only, and those of an
episode its own.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from penstock.services.episodes.episode import Answer, Episode, EpisodeOver
from penstock.services.episodes.http.anthropic import Anthropic
from penstock.services.episodes.http.chat import Chat
from penstock.services.episodes.http.dialect import BadRequest, Dialect, Question
from penstock.services.episodes.http.responses import Responses
from penstock.services.episodes.http.tokens import Tokens
from penstock.services.episodes.messages import Message, parse
from penstock.shared.bus.messages import FinishReason, no_ids, no_logprobs
from penstock.shared.errors import PermanentError, TemporaryError
from penstock.shared.peers.addresses import listen
from penstock.shared.peers.handshake import Newcomers, Secret
from penstock.shared.peers.turns import DrawnTurn
from penstock.shared.process.connections import ConnectionBounds, Connections, note_proven

_LARGEST_BODY = 16 << 20
_AT_A_TIME = 8
"""Requests of one episode."""
CONNECTIONS = 128
"""Of one episode; one more closes the one whose last request is oldest."""
_REMEMBERED = 8
"""Answers of an episode that are kept for retries."""
_DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/messages": Anthropic(),
    "/v1/responses": Responses(),
    "/inference/v1/generate": Tokens(),
}


@dataclasses.dataclass(slots=True, eq=False)
class _Visitor:
    """An episode, with its requests."""

    episode: Episode
    room: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(_AT_A_TIME))
    connections: Newcomers = dataclasses.field(default_factory=lambda: Newcomers(CONNECTIONS))
    asked: dict[str, "asyncio.Task[list[Answer]]"] = dataclasses.field(default_factory=dict)
    """By digest: the newest requests, running or answered."""
    drawing: "set[asyncio.Task[list[Answer]]]" = dataclasses.field(default_factory=set)
    """All that run: of equal requests too, of which ``asked`` has the newest."""


class Gateway:
    """``address``: ``host:port`` to listen at; ``context_tokens``: of the policy."""

    def __init__(
        self, address: str, secret: Secret, model: str, context_tokens: int, bounds: ConnectionBounds | None = None
    ) -> None:
        host, _, port = address.rpartition(":")
        self._connections = Connections(bounds or ConnectionBounds(), _refused)
        self._socket = listen(host.strip("[]"), int(port), "episodes.listen")
        self._secret, self._model, self._context_tokens = secret, model, context_tokens
        self._visitors: dict[str, _Visitor] = {}
        shown = host.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 (named to be replaced)
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"

    @contextlib.contextmanager
    def visited(self, episode: Episode) -> Iterator[str]:
        """Let the holder of the key that is yielded ask for turns of ``episode`` during the body."""
        prompt = episode.prompt
        words = f"episode {prompt.group_id}/{prompt.sample}/{secrets.token_hex(8)}".encode()
        key = f"ep-{hmac.digest(self._secret(), words, hashlib.sha256).hex()}"
        visitor = self._visitors[key] = _Visitor(episode)
        try:
            yield key
        finally:
            del self._visitors[key]
            for task in visitor.drawing:
                task.cancel()

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._connections.serve(self._app(), self._socket)

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        for path in (*_DIALECTS, "/v1/messages/count_tokens"):
            app.add_api_route(path, self._answered, methods=["POST"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        return app

    async def _models(self, request: Request) -> Response:
        if self._visitor(request) is None:
            return _refused(401, "this key is of no episode that runs")
        model = {"id": self._model, "object": "model", "owned_by": "penstock", "max_model_len": self._context_tokens}
        return JSONResponse({"object": "list", "data": [model]})

    async def _answered(self, request: Request) -> Response:
        visitor = self._visitor(request)
        if visitor is None:
            return _refused(401, "this key is of no episode that runs")
        if visitor.room.locked():
            return _refused(429, f"expected at most {_AT_A_TIME} requests of an episode at a time, found more")
        async with visitor.room:
            try:
                content, body = await _body(request)
                path = str(request.url.path)
                if path.endswith("/count_tokens"):
                    asked = _DIALECTS["/v1/messages"].read(body)
                    counted = await visitor.episode.count(asked.messages, asked.tools)
                    return JSONResponse({"input_tokens": counted})
                dialect = _DIALECTS[path]
                question = dialect.read(body)
                name, is_retry = _name(request, content)
                answers = await self._draw(visitor, question, name, is_retry=is_retry)
            except (BadRequest, PermanentError, ClientDisconnect) as error:
                return _refused(400, str(error))
            except TemporaryError as error:
                return _refused(503, str(error))
        model = str(body.get("model") or self._model)[:200]
        if not question.stream:
            return JSONResponse(dialect.write(answers, model))
        text = "".join(_event(name, data) for name, data in dialect.stream(answers, model))
        return Response(text, media_type="text/event-stream")

    def _visitor(self, request: Request) -> _Visitor | None:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        visitor = self._visitors.get(bearer) or self._visitors.get(request.headers.get("x-api-key", ""))
        if visitor is not None:
            note_proven(request.scope, visitor.connections)
        return visitor

    async def _draw(self, visitor: _Visitor, question: Question, name: str, *, is_retry: bool) -> list[Answer]:
        """Draw the answers, or return those to the request that this one repeats."""
        task = visitor.asked.get(name) if is_retry else None
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(_answers(visitor.episode, question))
            visitor.drawing.add(task)
            task.add_done_callback(visitor.drawing.discard)
            visitor.asked.pop(name, None)
            visitor.asked[name] = task
            for oldest in [each for each, asked in visitor.asked.items() if asked.done()][:-_REMEMBERED]:
                del visitor.asked[oldest]
        return await asyncio.shield(task)


async def _answers(episode: Episode, question: Question) -> list[Answer]:
    async def draw() -> Answer:
        try:
            if question.token_ids is not None:
                return await episode.answer_tokens(question.token_ids, question.max_tokens, question.stop)
            return await episode.answer(question.messages, question.tools, question.max_tokens, question.stop)
        except EpisodeOver:
            return _NOTHING

    return list(await asyncio.gather(*(draw() for _ in range(question.answers))))


_NOTHING = Answer(
    Message("assistant"),
    FinishReason.LENGTH,
    0,
    DrawnTurn(no_ids(), no_logprobs(), np.zeros((0, 2), dtype=np.int32), FinishReason.LENGTH),
)


async def _body(request: Request) -> tuple[bytes, Mapping[str, Any]]:
    """Raises BadRequest."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _LARGEST_BODY:
            raise BadRequest(f"expected a body of at most {_LARGEST_BODY >> 20} MiB, found more")
    try:
        body = parse(content.decode())
    except ValueError as error:
        raise BadRequest(f"expected JSON, found other content: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("expected a JSON object, found another value")
    return bytes(content), body


def _name(request: Request, content: bytes) -> tuple[str, bool]:
    """Return what names a request and its retries, and whether it may be one."""
    key = request.headers.get("idempotency-key")
    named = content if key is None else key.encode()
    name = hashlib.sha256(request.url.path.encode() + b"\n" + named).hexdigest()
    return name, key is not None or request.headers.get("x-stainless-retry-count", "0") != "0"


def _refused(status: int, message: str) -> JSONResponse:
    kind = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 503: "overloaded_error"}.get(
        status, "invalid_request_error"
    )
    error = {"type": kind, "message": message, "code": None, "param": None}
    headers = {"Connection": "close"} if status == 401 else {}
    return JSONResponse({"type": "error", "error": error}, status, headers)


def _event(name: str, data: Any) -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {'[DONE]' if data is None else json.dumps(data)}\n\n"
