"""Whether a replica takes new work: it does, unless people told it otherwise.

::

    (none) ──▶ cordoned   takes nothing new, finishes what it holds, stays; back by uncordon
           └─▶ draining   the same, and then leaves in order, exit 0

The word stands on the bus and is read with every heartbeat, so it holds after ``a heartbeat``, and for what a blocking read
brings within the second after that. A process that starts under the name of one that drained begins without it: whoever started it
wants it to work. This module stops nothing itself.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

from shared.bus.bus import Bus
from shared.bus.keys import key

CORDONS = key("cordons", "hash", "until uncordoned", "replica → cordoned or draining")


class Word(StrEnum):
    """What a replica was told."""

    CORDONED = "cordoned"
    DRAINING = "draining"


class Cordon:
    """One replica's side.

    Args:
        leave: is called once when it should leave.
    """

    def __init__(self, bus: Bus, replica: str, leave: Callable[[], None]) -> None:
        self._bus = bus
        self._replica = replica
        self._leave = leave
        self.taking = asyncio.Event()
        """Set while new work may be taken."""
        self.taking.set()

    async def begin(self) -> None:
        """Forget that an earlier process of this name was told to leave."""
        if (await cordons(self._bus)).get(self._replica) is Word.DRAINING:
            await uncordon(self._bus, self._replica)

    async def refresh(self) -> None:
        """Do as this replica is told."""
        word = (await cordons(self._bus)).get(self._replica)
        if word is None:
            self.taking.set()
            return
        self.taking.clear()
        if word is Word.DRAINING:
            self._leave()


async def cordons(bus: Bus) -> dict[str, Word]:
    """Return what each replica was told; those that were told nothing are not there."""
    raw = await bus.hgetall(CORDONS)
    words = {word.value.encode(): word for word in Word}
    return {replica.decode(errors="replace"): words[word] for replica, word in raw.items() if word in words}


async def tell_replica(bus: Bus, replica: str, word: Word) -> None:
    """Tell a replica to take nothing new, or to finish and leave."""
    await bus.write(CORDONS, "HSET", replica, word.value)


async def uncordon(bus: Bus, replica: str) -> None:
    """Let a replica take new work again."""
    await bus.write(CORDONS, "HDEL", replica)
