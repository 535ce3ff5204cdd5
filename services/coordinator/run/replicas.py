"""Heartbeats of the run's replicas, and which replicas are silent; a coordinator forgets these when it restarts."""

import time
from collections.abc import Callable, Mapping, Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.heartbeats import MISSED_HEARTBEATS, Heartbeat, ages_s, heartbeats, left

LOOK_S = 1.0


class Replicas:
    """Call :meth:`read` every ``LOOK_S``."""

    def __init__(self, bus: Bus, heartbeat_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.beats: Sequence[Heartbeat] = ()
        self._bus = bus
        self._now_s = now_s
        self._heartbeat_s = heartbeat_s
        self._longest_s = 2 * heartbeat_s + LOOK_S
        """Between two looks, or two that see new heartbeats; if it is longer, the bus did not answer, or took none."""
        self._silent_s = MISSED_HEARTBEATS * heartbeat_s
        self._newest: dict[str, tuple[Heartbeat, float]] = {}
        """Each replica's newest heartbeat, with when it was first seen, on the clock ``_counted_s``."""
        self._joined_s: dict[str, float] = {}
        """When each replica joined, on that clock, as those of hosts differ: when its first heartbeat was seen, or earlier."""
        self._counted_s = 0.0
        """Time in which the bus took heartbeats, if only the coordinator's own."""
        self._refused_s = 0.0
        """Time since it took one, in which it answered."""
        self._looked_at_s = now_s()

    async def read(self) -> Sequence[Heartbeat]:
        beats = self.beats = await heartbeats(self._bus)
        new = [beat for beat in beats if beat.replica not in self._newest or beat != self._newest[beat.replica][0]]
        gap_s, self._looked_at_s = self._now_s() - self._looked_at_s, self._now_s()
        self._refused_s += gap_s if gap_s <= self._longest_s else 0.0
        if new:
            self._counted_s += self._refused_s if self._refused_s <= self._longest_s else 0.0
            self._refused_s = 0.0
        self._note(new, {} if self._newest else await ages_s(self._bus, new, self._heartbeat_s))
        silent = self._newest.keys() - {beat.replica for beat in beats}
        gone = await left(self._bus, sorted(silent))
        gone |= {name for name in silent if self._is_replaced(*self._newest[name])}
        self._newest = {name: seen for name, seen in self._newest.items() if name not in gone}
        return beats

    def _note(self, new: Sequence[Heartbeat], ages_s: Mapping[str, float]) -> None:
        """Note heartbeats; ``ages_s``: of a first look, before which their replicas may have joined, or ceased."""
        for beat in new:
            at_s = self._counted_s - ages_s.get(beat.replica, 0.0)
            lived_s = beat.seen_at_s - beat.started_at_s if ages_s else 0.0
            self._joined_s.setdefault(beat.replica, at_s - lived_s)
            self._newest[beat.replica] = beat, at_s

    def bus_refuses_s(self) -> float | None:
        """Return the time since the bus took a heartbeat, of which a coordinator's is always one; None if it takes them."""
        expected = any(beat.service == "coordinator" for beat, _ in self._newest.values())
        return self._refused_s if expected and self._refused_s >= self._silent_s else None

    def silent(self) -> list[tuple[Heartbeat, float]]:
        """Return the last heartbeat of each replica that sends none, with the seconds since, in which the bus took others."""
        beating = {beat.replica for beat in self.beats}
        seen = [(beat, self._counted_s - at_s) for name, (beat, at_s) in self._newest.items() if name not in beating]
        return [(beat, seconds) for beat, seconds in seen if seconds >= self._silent_s]

    def _is_replaced(self, last: Heartbeat, at_s: float) -> bool:
        """Whether another replica of its service has joined after its last heartbeat, as a pod in place of a dead one."""
        return any(beat.service == last.service and self._joined_s[beat.replica] > at_s for beat in self.beats)
