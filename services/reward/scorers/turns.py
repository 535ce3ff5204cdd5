"""Run short computations one per pass of the event loop.

Otherwise 32 groups of 16 samples that take a millisecond each would block it for half a second.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """One computation per pass of the event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def take(self, work: Callable[[], T]) -> T:
        """Run ``work``, which is short; other tasks run before the next turn."""
        async with self._turn:
            result = work()
            await asyncio.sleep(0)
        return result
