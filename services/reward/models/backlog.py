"""When models that share their device should request it: once scoring the groups that wait completes a batch."""

import dataclasses
import math

_LEAST_QUIET_S = 1.0
_QUIET_TURNS = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """Ids of the groups in flight."""

    coming: frozenset[int]
    """Generated now, or being scored."""
    scored: frozenset[int]
    """With the trainer."""
    shown: frozenset[int] = frozenset()
    """Demonstrations, with the trainer."""

    def after(self, turn: frozenset[int]) -> "Flight":
        """Return the groups once those of ``turn`` are scored."""
        return dataclasses.replace(self, coming=self.coming - turn, scored=self.scored | turn)

    def batches(self, groups: int, *, waits: bool) -> int:
        """Return how many batches of ``groups`` the trainer can make (``services/trainer/rank0/intake.py``).

        Demonstrations keep their places among the groups in flight. ``waits``: for groups admitted before those of its
        batch.

        >>> Flight(frozenset({0, 3}), frozenset({1, 2})).batches(2, waits=False)
        1
        >>> Flight(frozenset({0, 3}), frozenset({1, 2})).batches(2, waits=True)
        0
        >>> Flight(frozenset({0, 4}), frozenset({2}), frozenset({1, 3})).batches(3, waits=False)
        0
        """
        scored, shown = sorted(self.scored), sorted(self.shown)
        first_coming = min(self.coming, default=math.inf)
        made = 0
        while True:
            due = len(set(sorted({*self.coming, *scored, *shown})[:groups]) & set(shown))
            batch = [*shown[:due], *scored[: groups - due]]
            if len(batch) < groups or (waits and first_coming < max(batch)):
                return made
            shown, scored = shown[due:], scored[groups - due :]
            made += 1


def is_due(waiting: int, room: int, quiet_s: float, turn_s: float, *, completes: bool) -> bool:
    """Whether models should request their device, so that turns are few and no group waits forever.

    Args:
        waiting: groups that wait for models.
        room: groups that the service takes.
        quiet_s: seconds since the last group arrived.
        turn_s: measured cost of a turn, without its forward passes.
        completes: whether those that wait complete the next batch.

    >>> is_due(6, room=32, quiet_s=0.0, turn_s=0.5, completes=True)
    True
    >>> is_due(6, room=32, quiet_s=1.9, turn_s=0.5, completes=False)
    False
    >>> is_due(6, room=32, quiet_s=2.0, turn_s=0.5, completes=False)
    True
    """
    if not waiting:
        return False
    return completes or waiting >= room or quiet_s >= max(_LEAST_QUIET_S, _QUIET_TURNS * turn_s)
