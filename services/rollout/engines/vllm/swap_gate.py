"""A gate before an engine, shut for swaps."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SwapGate:
    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self.is_shut = False
        self._inside = 0

    @contextlib.asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait for the gate; count as inside meanwhile."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_shut)
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            async with self._changed:
                self._changed.notify_all()

    async def shut(self, *, empty: bool = False) -> None:
        """Shut the gate; if ``empty``, wait until it is empty."""
        self.is_shut = True
        async with self._changed:
            await self._changed.wait_for(lambda: not (empty and self._inside))

    async def open(self) -> None:
        self.is_shut = False
        async with self._changed:
            self._changed.notify_all()
