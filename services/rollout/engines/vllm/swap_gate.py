"""A gate before an engine, shut for swaps."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SwapGate:
    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._shut = False
        self._inside = 0

    @property
    def is_shut(self) -> bool:
        """Whether requests wait."""
        return self._shut

    @contextlib.asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait for the gate; count as inside meanwhile."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._shut)
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            async with self._changed:
                self._changed.notify_all()

    async def shut(self, *, empty: bool = False) -> None:
        """Shut the gate; if ``empty``, wait until it is empty."""
        self._shut = True
        async with self._changed:
            await self._changed.wait_for(lambda: not (empty and self._inside))

    async def open(self) -> None:
        self._shut = False
        async with self._changed:
            self._changed.notify_all()
