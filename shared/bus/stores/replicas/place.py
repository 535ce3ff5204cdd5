"""The place of the run's trainer, of several that were started: one has it, whatever their names.

The newest to take the epoch takes the place and renews it. One whose place was taken ends, and if started again waits
until the place is free. Epochs, not the place, keep the commits apart.
"""

import asyncio
import os
import socket
import uuid

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key
from penstock.shared.bus.stores.replicas.heartbeats import MISSED_HEARTBEATS

PLACE = key("place", "string", "five heartbeats", "the trainer process that has the run's place, of several")
REPLACED = key("replaced", "set", "the run's", "replicas that ended because others took their places")


class Place:
    """The place as one process sees it."""

    def __init__(self, bus: Bus, replica: str, heartbeat_s: float) -> None:
        self._bus = bus
        self._replica = replica
        self._heartbeat_s = heartbeat_s
        self._process = f"{replica} (process {os.getpid()} on {socket.gethostname()}) {uuid.uuid4().hex}"
        self._is_replaced = False

    async def take(self) -> None:
        """Take the place, from whichever process has it."""
        await self._set()

    async def keep(self) -> None:
        """Renew the place, while no other has it, until cancelled."""
        while True:
            await self.renew()
            await asyncio.sleep(self._heartbeat_s)

    async def renew(self) -> None:
        if await self._bus.get(PLACE) == self._process.encode():
            await self._bus.write(PLACE, "PEXPIRE", self._ttl_ms)
        else:
            await self._set("NX")

    async def give_up(self) -> None:
        """Note that this replica ends because another process took the place."""
        await self._bus.write(REPLACED, "SADD", self._replica)

    async def occupant(self) -> str:
        """Return the process for whose end this one waits; empty: it may start, and has taken the place if it waited."""
        self._is_replaced = self._is_replaced or bool(await self._bus.ask("SISMEMBER", REPLACED, self._replica))
        if not self._is_replaced:
            return ""
        if await self._set("NX"):
            await self._bus.write(REPLACED, "SREM", self._replica)
            return ""
        return (await self._bus.get(PLACE) or b"another trainer ").decode(errors="replace").rpartition(" ")[0]

    async def _set(self, *condition: str) -> bool:
        return bool(await self._bus.write(PLACE, "SET", self._process, "PX", self._ttl_ms, *condition))

    @property
    def _ttl_ms(self) -> int:
        return int(self._heartbeat_s * MISSED_HEARTBEATS * 1000)
