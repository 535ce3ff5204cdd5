"""Whether a replica takes new work: a word on the bus, read with every heartbeat.

After that, a blocking read may still bring entries for one second, in a fleet of 1,000 for three. A process that
reuses the name of a drained replica starts without it.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key

CORDONS = key("cordons", "hash", "until uncordoned", "replica → cordoned or draining")


class Word(StrEnum):
    """What a replica was ordered to do."""

    CORDONED = "cordoned"
    DRAINING = "draining"


_WORDS = {word.value.encode(): word for word in Word}


class Cordon:
    """One replica's side. ``leave``: called once, when it should leave."""

    def __init__(self, bus: Bus, replica: str, leave: Callable[[], None]) -> None:
        self._bus = bus
        self._replica = replica
        self._leave = leave
        self.taking = asyncio.Event()
        self.taking.set()

    async def begin(self) -> None:
        """Forget an earlier process's word."""
        if (await cordons(self._bus)).get(self._replica) is Word.DRAINING:
            await uncordon(self._bus, self._replica)

    async def refresh(self) -> None:
        """Read and apply the current word."""
        self.hear(await self._bus.hget(CORDONS, self._replica))

    def hear(self, word: bytes | None) -> None:
        """Apply a word of the bus; None and unknown words: take work."""
        if word not in _WORDS:
            self.taking.set()
            return
        self.taking.clear()
        if _WORDS[word] is Word.DRAINING:
            self._leave()


async def cordons(bus: Bus) -> dict[str, Word]:
    """Return each cordoned or draining replica's word."""
    raw = await bus.hgetall(CORDONS)
    return {replica.decode(errors="replace"): _WORDS[word] for replica, word in raw.items() if word in _WORDS}


async def tell_replica(bus: Bus, replica: str, word: Word) -> None:
    await bus.write(CORDONS, "HSET", replica, word.value)


async def uncordon(bus: Bus, replica: str) -> None:
    """Let a replica take new work again."""
    await bus.write(CORDONS, "HDEL", replica)
