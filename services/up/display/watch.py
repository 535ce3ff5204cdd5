"""Poll the coordinator for the run's state and end.

Its last answer is kept while it is down.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.services.client.coordinator import AsyncCoordinator, RequestRefused, Unable, Unreachable, Unreadable, find
from penstock.services.client.views import EventView, ReplicaView, RunView
from penstock.shared.errors import PenstockError
from penstock.shared.files.durable import no_space

POLL_S = 1.0
SILENT_S = 8.0
"""Time without an answer of the coordinator after which that is reported."""


@dataclasses.dataclass(slots=True)
class RunSnapshot:
    run: RunView | None = None
    replicas: dict[str, ReplicaView] = dataclasses.field(default_factory=dict)
    at_s: float = 0.0
    url: str = ""


class Watch:
    def __init__(self, run_folder: Path, tell: Callable[[str], None], token: str = "") -> None:
        self.seen = RunSnapshot()
        self._tell = tell
        self._told = ""
        self._token = token
        self._run_folder = run_folder
        self._asking = asyncio.Lock()
        self._started_at_s = time.time()
        self._last_event = (0, 0)
        self._coordinator: AsyncCoordinator | None = None
        self._told_silent_s = 0.0
        self._unable = ""
        """Why the coordinator cannot answer, as it says; or empty."""

    async def run(self, on_news: Callable[[RunSnapshot], None]) -> None:
        try:
            while True:
                if await self.ask():
                    on_news(self.seen)
                await asyncio.sleep(POLL_S)
        finally:
            await self._forget()

    async def ask(self) -> bool:
        async with self._asking:
            try:
                coordinator = self._find()
                run, replicas = await coordinator.run(), await coordinator.replicas()
                self._tell_events(await coordinator.events())
            except (Unreachable, RequestRefused) as error:
                await self._forget()
                self._unable = error.reason if isinstance(error, Unable) else ""
                self._tell_once(error)
                return False
            by_name = {replica.replica: replica for replica in replicas}
            self.seen = RunSnapshot(run, by_name, time.time(), coordinator.url)
            self._told = ""
            if self._told_silent_s:
                self._told_silent_s = 0.0
                self._tell("the coordinator answers again")
            return True

    def look_for_silence(self) -> None:
        """Report, again after twice the time, that a coordinator which has answered does not any more."""
        silent_s = time.time() - self.seen.at_s
        if self.seen.run is not None and silent_s > max(SILENT_S, 2 * self._told_silent_s) and not self._told:
            self._told_silent_s = silent_s
            frozen = "it is frozen, has died, or is short of processor time; groups in flight are trained meanwhile"
            why = no_space(self._run_folder) or self._unable or frozen
            self._tell(f"the coordinator has not answered for {silent_s:.0f} s: {why}")

    async def finished(self) -> bool:
        answered = await self.ask()  # while it does, an evaluation after the last step needs every process
        run = self.seen.run
        return run is not None and (run.ended or (not answered and 0 < run.steps <= run.step))

    async def step(self) -> int | None:
        """Return the newest known step, or None while the run is paused."""
        await self.ask()
        run = self.seen.run
        if run is None:
            return 0
        return None if run.state == "paused" else run.step

    def _tell_events(self, events: Sequence[EventView]) -> None:
        """Report each event since the start once, except guards, which are notices."""
        for event in events:
            time_ms, _, number = event.id.partition("-")
            place = (int(time_ms or 0), int(number or 0))
            if event.at_s >= self._started_at_s and place > self._last_event:
                self._last_event = place
                if event.source != "guard":
                    self._tell(f"{event.name}: {event.detail}")

    def _tell_once(self, error: PenstockError) -> None:
        """Report unreadable answers once; no answer is normal during starts."""
        if isinstance(error, (Unreadable, RequestRefused)) and str(error) != self._told:
            self._told = str(error)
            self._tell(self._told)

    def _find(self) -> AsyncCoordinator:
        if self._coordinator is None:
            self._coordinator = AsyncCoordinator(find(None, self._run_folder), self._token)
        return self._coordinator

    async def _forget(self) -> None:
        """The next coordinator has another port."""
        if self._coordinator is not None:
            coordinator, self._coordinator = self._coordinator, None
            await coordinator.close()
