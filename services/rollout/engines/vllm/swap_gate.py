"""A gate that requests pass on their way into an engine: shut while weights are swapped, if that is asked for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SwapGate:
    """Open at first. Lets requests through while it is open, and knows how many are inside."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._shut = False
        self._inside = 0

    @property
    def is_shut(self) -> bool:
        """Whether nobody gets in."""
        return self._shut

    @contextlib.asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait until the gate is open; be inside meanwhile."""
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
        """Let nobody in any more; wait until nobody is inside, if ``empty``."""
        self._shut = True
        async with self._changed:
            await self._changed.wait_for(lambda: not (empty and self._inside))

    async def open(self) -> None:
        """Let everybody in."""
        self._shut = False
        async with self._changed:
            self._changed.notify_all()
