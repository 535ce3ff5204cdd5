"""Follow a run's records for one sink; a failed batch, and that of a killed service, is sent again."""

import asyncio
import contextlib
import copy
import dataclasses
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

from penstock.services.tracking.offset import Offset
from penstock.services.tracking.points import REPORT, Point, Segments, results_of
from penstock.services.tracking.sink_client import SinkClient, SinkFailure
from penstock.services.tracking.tables import RolloutLines
from penstock.shared.backoff import Backoff
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import StepReport
from penstock.shared.bus.stores.policy.evaluations import evaluated, results
from penstock.shared.bus.stores.run.records import following, wait_for_any
from penstock.shared.errors import MessageError, SettingsError


class ReportFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._digest = ""

    def digest(self) -> str:
        """Return the digest of the file's contents; "" without a file. Raises OSError: it cannot be read."""
        try:
            stat = self.path.stat()
            if not S_ISREG(stat.st_mode):
                return ""  # to open a pipe would wait for its writer
            now = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if now != self._seen:
                with self.path.open("rb") as file:
                    self._digest = hashlib.file_digest(file, "sha256").hexdigest()
                self._seen = now
        except FileNotFoundError:
            return ""
        return self._digest


log = logging.getLogger(__name__)

_BATCH = 100
_TABLES = 8
"""Rollout tables in a batch."""
_WAIT_S = 0.5
AGAIN = Backoff(first_s=0.5, longest_s=60.0)

T = TypeVar("T")
Tell = Callable[[str, str], Awaitable[None]]


SEPARATE = ("mlflow",)
"""Sinks that keep tables and the report in another store than metrics: a process and an offset of their own send them."""


class Follower:
    """Deliver every step, evaluation and rollout table to one sink exactly once, and each new report.

    Steps and evaluations are read from the bus, tables and the report from ``folder``, the run's. ``behind``: only
    tables and the report, and those only once that follower, which then leaves them out, has delivered their steps.
    """

    def __init__(
        self,
        name: str,
        bus: Bus,
        folder: Path,
        sink: SinkClient,
        tell: Tell,
        again: Backoff = AGAIN,
        every_s: float = 0.0,
        behind: "Follower | None" = None,
    ) -> None:
        self.name = name if behind is None else f"{name}-artifacts"
        self.trouble = ""
        """Why nothing is delivered now."""
        self._bus = bus
        self._path = folder / "tracking" / f"{self.name}.json"
        self._behind = behind
        self._has_artifacts_apart = False
        if behind is not None:
            behind._has_artifacts_apart = True
        self._sink = sink
        self._tell = tell
        self._again = again
        self._every_s = every_s
        self._offset: Offset | None = None
        self._delivered: Segments | None = None
        """The segments after the last batch that was delivered."""
        self._rollouts = RolloutLines(folder / "rollouts.jsonl")
        self._report = ReportFile(folder / "report.html")
        self._failures = 0
        self._is_complete = False
        self._unreadable = ""

    @property
    def delivered(self) -> int:
        """Points of the current segment that are in the tracker."""
        return 0 if self._offset is None else self._offset.segments.points - len(self._offset.pending)

    @property
    def undelivered(self) -> str:
        """Why the tracker has not received all records, after :func:`finish`; "" if it has."""
        if self._is_complete:
            return ""
        received = f"not all records ({self.delivered} points)" if self.delivered > 0 else "nothing"
        return f"it received {received}: {self.trouble or 'it did not answer in time'}; the log of tracking-0 has more"

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if await self.deliver():
                await _wait(stop, self._every_s)
            elif self.trouble:
                await _wait(stop, self._again.wait_s(self._failures))
            elif self._behind is not None or self._offset is None:
                await _wait(stop, _WAIT_S)
            else:
                await wait_for_any(self._bus, {streams.STEPS: self._offset.after}, _WAIT_S)

    async def close(self, within_s: float) -> None:
        await self._sink.close(within_s)

    async def deliver(self) -> bool:
        """Deliver one batch; return whether there was one and the sink took it. Nothing is lost if it is cancelled."""
        self._is_complete = False
        try:
            offset = self._offset = self._offset or self._load()
            if not offset.pending:
                ahead = await self._read(copy.deepcopy(offset))
                if not ahead.pending:
                    self._is_complete = True
                    self._offset = ahead  # passed over what cannot be read
                    return False
                ahead.write(self._path)
                offset = self._offset = ahead
            state = await self._sink.write(self._deliverable(offset.pending), offset.sink)
            done = dataclasses.replace(offset, pending=[], sink=state)
            done.write(self._path)
            self._offset, self._delivered = done, copy.deepcopy(done.segments)
        except (SinkFailure, SettingsError, OSError) as error:
            await self._failed(str(error))
            return False
        if self.trouble:
            self.trouble, self._failures = "", 0
            await self._tell("tracker works again", self.name)
        return True

    def _load(self) -> Offset:
        offset = Offset.read(self._path)
        if offset.segments.points > 0 and not offset.pending:
            self._delivered = copy.deepcopy(offset.segments)
        return offset

    async def _failed(self, reason: str) -> None:
        self._failures += 1
        log.warning("tracker failed", extra={"sink": self.name, "reason": reason})
        if not self.trouble:
            await self._tell("tracker failed", f"{self.name}: {reason}: training continues, and it is tried again")
        self.trouble = reason

    async def _read(self, offset: Offset) -> Offset:
        if self._behind is None:
            more = await self._read_bus(offset)
        elif self._behind._delivered is None:  # the tracker has no run yet
            return offset
        else:
            more, offset.segments = False, copy.deepcopy(self._behind._delivered)
        if not self._has_artifacts_apart:
            lines = await self._read_rollouts(offset)
            if not more and lines < _TABLES:
                await self._read_report(offset)
        return offset

    async def _read_bus(self, offset: Offset) -> bool:
        """Add the points of steps and evaluations; return whether there are more."""
        rows = await following(self._bus, streams.STEPS, offset.after, _BATCH)
        for entry, fields in rows:
            offset.after = entry
            try:
                report = wire.decode(fields.get(b"data", b""), StepReport)
            except MessageError as error:
                log.warning("unreadable record passed over", extra={"entry": entry, "reason": str(error)})
            else:
                offset.pending.append(offset.segments.of_step(report))
        if len(rows) < _BATCH and (new := sorted(await evaluated(self._bus) - set(offset.evaluated))):
            for version, raw in (await results(self._bus, new)).items():
                offset.pending.append(offset.segments.of_evaluation(results_of(raw)))
                offset.evaluated.append(version)
        return len(rows) == _BATCH

    async def _read_rollouts(self, offset: Offset) -> int:
        newest_version = offset.segments.last_version
        reading = asyncio.to_thread(self._rollouts.following, offset.rollouts, newest_version, _TABLES)
        lines = await self._from_folder(reading) or []
        for line in lines:
            offset.rollouts = line["entry"]
            try:
                offset.pending.append(offset.segments.of_rollout(line))
            except ValueError as error:
                log.warning("unreadable rollouts passed over", extra={"entry": line["entry"], "reason": str(error)})
        return len(lines)

    async def _read_report(self, offset: Offset) -> None:
        digest = await self._from_folder(asyncio.to_thread(self._report.digest))
        if digest and digest != offset.report:
            offset.pending.append(offset.segments.of_report(self._report.path, time.time()))
            offset.report = digest

    async def _from_folder(self, reading: Awaitable[T]) -> T | None:
        """Return what a file of the run's folder holds; None if it cannot be read, which delays nothing else."""
        try:
            return await reading
        except OSError as error:
            if str(error) != self._unreadable:
                log.warning("file of the run unreadable", extra={"sink": self.name, "reason": str(error)})
            self._unreadable = str(error)
            return None

    def _deliverable(self, points: list[Point]) -> list[Point]:
        """Return the points without a report that was removed since."""
        path = self._report.path
        reported = ({**point, REPORT: str(path)} if REPORT in point else point for point in points)
        return [point for point in reported if REPORT not in point or path.is_file()]


async def finish(followers: Sequence[Follower], within_s: float) -> None:
    """Deliver what a sink's followers have left, as far as the time allows, and close them."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            for follower in followers:
                while await follower.deliver():
                    pass
    await asyncio.gather(*(follower.close(within_s) for follower in followers))


async def _wait(stop: asyncio.Event, wait_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await stop.wait()
