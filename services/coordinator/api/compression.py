"""Answers to GET that are not sent twice: an ETag for each, 304 where the client has it, gzip otherwise."""

import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LEAST_BYTES, _LEVEL = 1000, 5


class Compressed(GZipMiddleware):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__(_Tagged(app), minimum_size=_LEAST_BYTES, compresslevel=_LEVEL)
        self._plain = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers to commands stay plain: they are kept, for clients that may read another encoding."""
        reads = scope["type"] == "http" and scope["method"] == "GET"
        await (super().__call__(scope, receive, send) if reads else self._plain(scope, receive, send))


class _Tagged:
    """Whole JSON answers; streams and errors pass."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = Headers(scope=scope).get("if-none-match", "")
        start: Message = {}

        async def tagged(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                if not _is_whole_json(message):
                    start = {}
                    await send(message)
                return
            if start:
                headers = MutableHeaders(raw=start["headers"])
                tag = headers.get("etag") or f'"{hashlib.sha256(message["body"]).hexdigest()[:32]}"'
                headers["etag"] = tag
                if tag in [each.strip().removeprefix("W/") for each in known.split(",")]:
                    start["status"], message = 304, {**message, "body": b""}
                    del headers["content-length"]
                await send(start)
                start = {}
            await send(message)

        await self._app(scope, receive, tagged)


def _is_whole_json(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return start["status"] == 200 and headers.get("content-type") == "application/json" and "content-length" in headers
