"""The run's clock: time counts only while processes of the run are there.

::

    each second                the leader notes that the run is alive
    a leader begins to lead    no process was seen since, until the first that runs now began: the gap counts as a pause

A leader that takes over from another finds the heartbeats of processes that ran all the time, and thus no gap.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState, RunStatus
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, heartbeats

_NOTE_S = 1.0
_LEAST_GAP_S = 5.0
"""A shorter one may be a change of the leader."""


@dataclasses.dataclass(eq=False)
class RunClock:
    bus: Bus
    ledger: Ledger
    steps: int

    async def run(self) -> None:
        """Note that the run is alive, until cancelled."""
        while True:
            await self.ledger.note("alive_s", repr(time.time()))
            await asyncio.sleep(_NOTE_S)

    async def resume(self, began_s: float, now_s: float) -> None:
        """Count the time in which no process ran as a pause, if the run was to train; this process began at ``began_s``."""
        status = await self.ledger.status()
        if status.state is not RunState.RUNNING or status.first_admission_s is None:
            return  # leaving these states counts the whole time
        since_s, until_s = gap(status, await heartbeats(self.bus), began_s)
        if status.step >= self.steps and (status.last_commit_s or 0.0) < until_s:
            return  # it had been trained before the gap
        if status.alive_s and until_s - since_s > _LEAST_GAP_S:
            await self.ledger.skip_time(status, since_s, until_s, now_s)


def gap(status: RunStatus, beats: Sequence[Heartbeat], began_s: float) -> tuple[float, float]:
    """Return from when, and until when, no process is known to have run; the end is earlier if processes ran all the time."""
    replicas = [beat for beat in beats if beat.service != "coordinator"]
    older_s = [beat.seen_at_s for beat in replicas if beat.started_at_s < status.alive_s]
    until_s = min([began_s, *(beat.started_at_s for beat in replicas if beat.started_at_s >= status.alive_s)])
    marks_s = (status.first_admission_s, status.last_commit_s, status.changed_at_s)
    earlier_s = [at_s for at_s in marks_s if at_s is not None and at_s < until_s]
    return max([status.alive_s, *older_s, *earlier_s]), until_s
