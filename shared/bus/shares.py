"""One consumer's share of a stream's entries, and of the looks for those to reclaim."""

from redis.exceptions import ResponseError

from penstock.shared.bus.client.commands import Commands, text
from penstock.shared.bus.streams import Stream

_PORTIONS = 8
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 3.0
_LOOKS_PER_S = 300


def portion(room: int, unit: int) -> int:
    """Return how many entries a consumer with ``room`` reads at a time: an eighth of it in whole ``unit``s, if any.

    >>> portion(512, 8), portion(100, 8), portion(20, 8), portion(5, 8), portion(512, 0)
    (64, 8, 8, 5, 512)
    """
    if not unit:
        return room
    return min(room, max(unit, room // _PORTIONS // unit * unit))


def pause_s(consumers: int, claim_after_s: float) -> float:
    """Return the seconds between two looks of each consumer: in a large fleet, another one looks soon.

    >>> pause_s(2, 30.0), pause_s(600, 30.0), pause_s(10_000, 30.0), pause_s(2, 0.6)
    (1.0, 2.0, 3.0, 0.3)
    """
    return min(max(_PAUSE_S, consumers / _LOOKS_PER_S), _LONGEST_PAUSE_S, claim_after_s / 2)


async def consumers(bus: Commands, stream: Stream) -> int:
    """Return the number of consumers that the stream's group has had; 0 if there is no such stream."""
    try:
        groups = await bus.ask("XINFO GROUPS", stream)
    except ResponseError as error:
        if "no such key" not in str(error):
            raise
        return 0
    return sum(group["consumers"] for group in groups if text(group["name"]) == stream.group)
