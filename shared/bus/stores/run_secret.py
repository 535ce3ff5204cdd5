"""The secret of a run, by which its processes know each other on ports beside the bus. It is a key on the bus, so
every process that can use the bus has it.

The first process of a run creates it. With every heartbeat each process restores a key that is missing, so a bus that
lost its data gets the same secret back; if a new process created another in between, all processes adopt the one on
the bus.
"""

import secrets
from collections.abc import Callable

from shared.bus.bus import Bus
from shared.bus.keys import key

SECRET = key(
    "secret", "string", "the run's", "the secret by which processes of the run know each other on ports beside the bus"
)


class RunSecret:
    """The secret of the run of ``bus``; empty until :meth:`refresh` has returned. It is in no settings, arguments or
    logs.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._value = b""
        self._listeners: list[Callable[[bytes], None]] = []

    def __call__(self) -> bytes:
        """Return it as it was last read."""
        return self._value

    def __repr__(self) -> str:
        return "RunSecret(…)"

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call ``listener`` with the secret, now and after each change that this process learns of."""
        self._listeners.append(listener)
        listener(self._value)

    async def refresh(self) -> None:
        """Read it, after writing it where there is none."""
        await self._bus.write(SECRET, "SET", self._value or secrets.token_hex(32), "NX")
        before = self._value
        self._value = await self._bus.get(SECRET) or before
        if self._value != before:
            for listener in self._listeners:
                listener(self._value)
