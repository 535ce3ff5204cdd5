"""Training first: evaluation groups take the room in the engine that training leaves, and a small share of it always.

::

    room for evaluation = max(capacity − samples of training in the engine, capacity / 8), or one group where the engine has none of it

It counts samples; it knows no engine and no bus.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_SHARE = 8


class Precedence:
    """Who may go into an engine that decodes ``capacity`` samples at a time."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._training = 0
        self._evaluating = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def turn(self, samples: int, *, training: bool) -> AsyncIterator[None]:
        """Be inside with a group of ``samples``: at once for training, else as soon as there is room."""
        if training:
            self._training += samples
        else:
            async with self._changed:
                await self._changed.wait_for(lambda: self._has_room(samples))
                self._evaluating += samples
        try:
            yield
        finally:
            if training:
                self._training -= samples
            else:
                self._evaluating -= samples
            async with self._changed:
                self._changed.notify_all()

    def _has_room(self, samples: int) -> bool:
        room = max(self._capacity - self._training, self._capacity // _SHARE)
        return self._evaluating == 0 or self._evaluating + samples <= room
