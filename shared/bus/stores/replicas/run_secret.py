"""A run's secret, by which its processes authenticate each other on other ports.

The first process creates it. With every heartbeat each process restores a missing key, so a bus that lost its data gets
the same secret back; if a new process created another meanwhile, all adopt that one.
"""

import secrets
from collections.abc import Callable

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key

SECRET = key("secret", "string", "the run's", "the secret by which processes of the run authenticate each other")


async def known_secret(bus: Bus) -> bytes:
    """Return the run's secret; empty if it has none."""
    return await bus.get(SECRET) or b""


class RunSecret:
    """The run's secret, in no settings, arguments or logs; empty until :meth:`refresh` has returned."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._value = b""
        self._listeners: list[Callable[[bytes], None]] = []

    def __call__(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "RunSecret(…)"

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call ``listener`` with the secret now and after each change."""
        self._listeners.append(listener)
        listener(self._value)

    async def refresh(self) -> None:
        await self.hear(await self._bus.get(SECRET))

    async def hear(self, known: bytes | None) -> None:
        """Adopt the secret of the bus; None: restore it, or create one."""
        before = self._value
        if known is None:
            await self._bus.write(SECRET, "SET", self._value or secrets.token_hex(32), "NX")
            known = await self._bus.get(SECRET)
        self._value = known or before
        if self._value != before:
            for listener in self._listeners:
                listener(self._value)
