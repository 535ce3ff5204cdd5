"""Held-out demonstrations, written by the coordinator for the trainer, which reports their loss."""

from collections.abc import Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import Experience

HELD_OUT = key("held_out", "hash", "the run's", "index → held-out demonstration whose loss the trainer reports")


async def offer(bus: Bus, groups: Sequence[Experience]) -> None:
    """Replace the demonstrations."""
    await bus.write(HELD_OUT, "DEL")
    if groups:
        fields = [part for index, group in enumerate(groups) for part in (str(index), wire.encode(group))]
        await bus.write(HELD_OUT, "HSET", *fields)


async def offered(bus: Bus) -> tuple[bytes, ...]:
    """Return the encoded demonstrations, in order."""
    rows = await bus.hgetall(HELD_OUT)
    return tuple(rows[index] for index in sorted(rows, key=int))
