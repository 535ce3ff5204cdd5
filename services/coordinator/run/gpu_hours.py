"""Count GPU-hours, pause a run whose budget is used, and stop one whose time is over.

A GPU counts while a heartbeat names it, whether it works or waits; one that several processes share counts once.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState, RunStatus
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.process.telemetry import tell

_LOOK_S = 1.0
_HOUR_S = 3600.0
_UNFINISHED = (RunState.CREATED, RunState.RUNNING, RunState.PAUSED)


def held_since(beats: Sequence[Heartbeat], until_s: float) -> dict[tuple[str, str], float]:
    """Return each GPU, as (host, number), with the time from which it is not counted yet."""
    since: dict[tuple[str, str], float] = {}
    for beat in beats:
        for number in beat.gpus:
            start_s = max(until_s, beat.started_at_s)
            since[beat.host, number] = min(start_s, since.get((beat.host, number), start_s))
    return since


@dataclasses.dataclass(eq=False)
class GpuHours:
    """The leader's loop."""

    bus: Bus
    ledger: Ledger
    live: Live
    beats: Callable[[], Sequence[Heartbeat]]
    """Return the newest heartbeats."""
    deadline_s: float
    """The run's maximum age; 0: none."""
    changed: Callable[[], None]
    """Called after a pause or stop."""

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            await self.look(time.time())
            await asyncio.sleep(_LOOK_S)

    async def look(self, now_s: float) -> None:
        """Count until ``now_s``; pause or stop the run if a limit is reached."""
        status = await self.ledger.status()
        since = held_since(self.beats(), status.gpu_until_s)
        gpu_s = status.gpu_s + sum(max(0.0, now_s - start_s) for start_s in since.values())
        await self.ledger.note("gpu_time", f"{gpu_s!r} {max(now_s, status.gpu_until_s)!r}")
        await self._limit(status, gpu_s / _HOUR_S, now_s)

    async def _limit(self, status: RunStatus, gpu_hours: float, now_s: float) -> None:
        budget = self.live.settings.run.gpu_hours
        if budget and gpu_hours >= budget and status.state is RunState.RUNNING:
            reason = f"the budget run.gpu_hours = {budget:g} is used: raise it (PATCH /v1/run/settings), then resume"
            await self._change(RunState.PAUSED, "gpu budget used", reason, [RunState.RUNNING])
        if self.deadline_s and status.state in _UNFINISHED and now_s - status.created_at_s >= self.deadline_s:
            reason = f"activeDeadlineSeconds = {self.deadline_s:g} have passed since the run was created"
            await self._change(RunState.STOPPED, "deadline passed", reason, _UNFINISHED)

    async def _change(self, to: RunState, event: str, reason: str, allowed: Sequence[RunState]) -> None:
        changed, _ = await self.ledger.transition(to, reason, allowed)
        if changed:
            await tell(self.bus, "coordinator", event, reason)
            self.changed()
