"""Shared and exclusive work in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Crowd:
    """A shared/exclusive lock that prefers those waiting for exclusive use."""

    def __init__(self) -> None:
        self._sharing = 0
        self._waiting = 0
        self._alone = False
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Work beside others."""
        await self._until(lambda: not self._alone and not self._waiting)
        self._sharing += 1
        try:
            yield
        finally:
            self._sharing -= 1
            self._wake()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            await self._until(lambda: not self._alone and not self._sharing)
            self._alone = True
        finally:
            self._waiting -= 1
            self._wake()
        try:
            yield
        finally:
            self._alone = False
            self._wake()

    async def _until(self, free: Callable[[], bool]) -> None:
        while not free():
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()
