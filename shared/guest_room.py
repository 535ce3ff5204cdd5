"""How many samples a guest generates at a time (docs/placement.md): in rollout replicas, and in the plan's simulation."""

_FIRST = 0.25
"""Of the most."""
_GAIN = 0.25
"""Of a sample, for each one that ended in time."""
_LOSS = 0.1
"""Of the room, for each group that ended late."""


class GuestRoom:
    """The samples that a guest takes at a time, as far as they end before they are stale.

    A guest pauses while the trainer trains, so its samples take longer than elsewhere, and those that end more than
    ``algorithm.max_lag`` steps after they began are generated in vain, while they kept places of the groups in flight.
    Room grows by what ended in time and shrinks in proportion by what was late, as senders find their share of a link
    (additive increase, multiplicative decrease; Chiu and Jain, 1989).

    Args:
        most: samples that the replica has room for.
        group_size: samples of a group, the least room.

    >>> room = GuestRoom(512, 8)
    >>> room.samples
    128
    >>> room.note(8, late=False)
    >>> room.samples
    130
    >>> room.note(8, late=True)
    >>> room.samples
    117
    """

    def __init__(self, most: int, group_size: int) -> None:
        self._most = most
        self._group_size = min(group_size, most)
        self._room = max(float(self._group_size), _FIRST * most)

    @property
    def samples(self) -> int:
        return int(self._room)

    def note(self, samples: int, *, late: bool) -> None:
        """Note samples of a group that ended, or, ``late``, that ended stale or were handed back."""
        kept = (1 - _LOSS) ** (samples / self._group_size)
        room = self._room * kept if late else self._room + _GAIN * samples
        self._room = min(float(self._most), max(float(self._group_size), room))
