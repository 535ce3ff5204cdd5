"""Training first: evaluation groups get the engine's free room, at least a small share.

::

    room for evaluation = max(capacity − samples of training in the engine, capacity / 8)
                          or one group if the engine has none
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_SHARE = 8


class Precedence:
    """Admission to an engine with ``capacity`` samples."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._training = 0
        self._evaluating = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def turn(self, samples: int, *, training: bool) -> AsyncIterator[None]:
        """Hold room for ``samples``: at once for training, else when available."""
        if training:
            self.begin(samples)
        else:
            async with self._changed:
                await self._changed.wait_for(lambda: self._has_room(samples))
                self._evaluating += samples
        try:
            yield
        finally:
            if not training:
                self._evaluating -= samples
            await self.end(samples if training else 0)

    def begin(self, samples: int) -> None:
        """Hold room for training at once."""
        self._training += samples

    async def end(self, samples: int) -> None:
        """Return room held for training."""
        self._training -= samples
        async with self._changed:
            self._changed.notify_all()

    def _has_room(self, samples: int) -> bool:
        room = max(self._capacity - self._training, self._capacity // _SHARE)
        return self._evaluating == 0 or self._evaluating + samples <= room
