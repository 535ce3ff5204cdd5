"""Count GPU-hours, pause a run whose budget is used, and stop one whose time is over.

A GPU counts while a heartbeat names it, whether it works or waits; one that several processes share counts once.
"""

import asyncio
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


class GpuHours:
    """The leader's loop.

    Args:
        beats: newest heartbeats.
        deadline_s: the run's maximum age; 0: none.
        changed: called after a pause or stop.
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        live: Live,
        beats: Callable[[], Sequence[Heartbeat]],
        deadline_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._live = live
        self._beats = beats
        self._deadline_s = deadline_s
        self._changed = changed

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            await self.look(time.time())
            await asyncio.sleep(_LOOK_S)

    async def look(self, now_s: float) -> None:
        """Count until ``now_s``; pause or stop the run if a limit is reached."""
        status = await self._ledger.status()
        since = held_since(self._beats(), status.gpu_until_s)
        gpu_s = status.gpu_s + sum(max(0.0, now_s - start_s) for start_s in since.values())
        await self._ledger.note("gpu_time", f"{gpu_s!r} {max(now_s, status.gpu_until_s)!r}")
        await self._limit(status, gpu_s / _HOUR_S, now_s)

    async def _limit(self, status: RunStatus, gpu_hours: float, now_s: float) -> None:
        budget = self._live.settings.run.gpu_hours
        if budget and gpu_hours >= budget and status.state is RunState.RUNNING:
            reason = f"the budget run.gpu_hours = {budget:g} is used: raise it (PATCH /v1/run/settings), then resume"
            await self._change(RunState.PAUSED, "gpu budget used", reason, [RunState.RUNNING])
        if self._deadline_s and status.state in _UNFINISHED and now_s - status.created_at_s >= self._deadline_s:
            reason = f"activeDeadlineSeconds = {self._deadline_s:g} have passed since the run was created"
            await self._change(RunState.STOPPED, "deadline passed", reason, _UNFINISHED)

    async def _change(self, to: RunState, event: str, reason: str, allowed: Sequence[RunState]) -> None:
        changed, _ = await self._ledger.transition(to, reason, allowed)
        if changed:
            await tell(self._bus, "coordinator", event, reason)
            self._changed()
