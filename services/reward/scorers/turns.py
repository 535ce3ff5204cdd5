"""Let scorers compute in the event loop in turn, so that the loop is never held for longer than the longest of them takes.

Without turns, all groups that are ready compute in the same pass of the loop, one after another: 32 groups of 16 samples that take a
millisecond each would hold it for half a second.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """One computation for each pass of the event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def take(self, work: Callable[[], T]) -> T:
        """Return what ``work``, which is short, computes; others run before the next turn."""
        async with self._turn:
            result = work()
            await asyncio.sleep(0)
        return result
