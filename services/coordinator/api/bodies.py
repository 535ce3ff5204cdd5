"""Request bodies, bounded in size, time and total memory.

A body counts until its request is answered.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from penstock.services.coordinator.api.errors import RETRY_AFTER_S, problem


@dataclasses.dataclass(frozen=True, slots=True)
class BodyBounds:
    each_bytes: int = 1 << 20
    total_bytes: int = 16 << 20
    whole_s: float = 20.0
    """Seconds from head to end of body."""


class BodyRefused(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        headers = {503: {"Retry-After": str(RETRY_AFTER_S)}, 408: {"Connection": "close"}}
        self.answer: Response = problem(status, detail, headers.get(status))


class Bodies:
    def __init__(self, bounds: BodyBounds | None = None) -> None:
        self._bounds = bounds or BodyBounds()
        self._held_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, receive: Receive) -> AsyncIterator[bytes]:
        """Raises BodyRefused: it exceeds a limit; ClientDisconnect: it is incomplete."""
        parts: list[bytes] = []
        try:
            await self._collect(parts, receive)
            yield b"".join(parts)
        finally:
            self._held_bytes -= sum(map(len, parts))

    async def _collect(self, parts: list[bytes], receive: Receive) -> None:
        try:
            async with asyncio.timeout(self._bounds.whole_s):
                while await self._more(parts, receive):
                    pass
        except TimeoutError:
            detail = f"expected the whole body within {self._bounds.whole_s:.0f} s: send it faster"
            raise BodyRefused(408, detail) from None

    async def _more(self, parts: list[bytes], receive: Receive) -> bool:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        self._held_bytes += len(parts[-1])
        if sum(map(len, parts)) > self._bounds.each_bytes:
            raise BodyRefused(413, f"expected a body of at most {self._bounds.each_bytes} bytes, found more")
        if self._held_bytes > self._bounds.total_bytes:
            detail = f"expected at most {self._bounds.total_bytes} bytes in the bodies of all requests together"
            raise BodyRefused(503, f"{detail}, and the limit is reached: try again")
        return bool(message.get("more_body", False))
