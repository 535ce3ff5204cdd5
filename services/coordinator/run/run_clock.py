"""The run's clock: time counts only while processes of the run are there.

::

    each second                the leader notes that the run is alive
    a leader begins to lead    alive long ago, and no process has been seen since: the gap counts as a pause

A leader that takes over from another finds the heartbeats of processes that ran all the time, and thus no gap.
"""

import asyncio
import time

from shared.bus.bus import Bus
from shared.bus.stores.policy.ledger import Ledger, RunState, RunStatus
from shared.bus.stores.replicas.heartbeats import heartbeats

_NOTE_S = 1.0
_LEAST_GAP_S = 5.0
"""A shorter one may be a change of the leader."""


class RunClock:
    def __init__(self, bus: Bus, ledger: Ledger, steps: int) -> None:
        self._bus = bus
        self._ledger = ledger
        self._steps = steps

    async def run(self) -> None:
        """Note that the run is alive, until cancelled."""
        while True:
            await self._ledger.note("alive_s", repr(time.time()))
            await asyncio.sleep(_NOTE_S)

    async def resume(self, now_s: float) -> None:
        """Count the time since a process of the run was last seen as a pause, if the run was to train."""
        status = await self._ledger.status()
        if status.state is not RunState.RUNNING or status.first_admission_s is None or status.step >= self._steps:
            return  # leaving these states counts the whole time
        since_s = await self._last_seen_s(status)
        if status.alive_s and now_s - since_s > _LEAST_GAP_S:
            await self._ledger.skip_time(status, since_s, now_s)

    async def _last_seen_s(self, status: RunStatus) -> float:
        """``status.alive_s``, or when a process was seen that ran then already, or did work."""
        beats = await heartbeats(self._bus)
        seen_s = [
            beat.seen_at_s for beat in beats if beat.service != "coordinator" and beat.started_at_s < status.alive_s
        ]
        began_s, committed_s = status.changed_at_s, status.last_commit_s or 0.0
        return max(status.alive_s, status.first_admission_s or 0.0, began_s, committed_s, *seen_s)
