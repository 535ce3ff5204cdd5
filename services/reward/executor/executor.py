"""Run jobs and the cells of sessions.

::

    run(job)                ──▶ a slot ──▶ zygote ──▶ program.RunningProgram ──▶ verdict.outcome_of(wait status, …)
    run_cell(session, cell) ──▶ a slot ──▶ session.Session: one interpreter, suspended between its cells

A dead or hanging zygote is replaced; its programs end as ``sandbox_error``.
"""

import asyncio
import dataclasses
import itertools
import logging
import time

from prometheus_client import Counter, Histogram

from penstock.services.reward.executor.isolation import Isolation
from penstock.services.reward.executor.program import RunningProgram, sealed
from penstock.services.reward.executor.session import Session
from penstock.services.reward.executor.slots import SESSIONS_PER_SLOT, Claim, Slots
from penstock.services.reward.executor.verdict import outcome_of, read_report
from penstock.services.reward.executor.zygote_process import ZygoteLost, ZygoteProcess, Zygotes
from penstock.shared.executor.protocol import Cell, Execution, Job, Outcome

log = logging.getLogger(__name__)

_SECONDS = (0.002, 0.004, 0.006, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
EXECUTIONS = Counter("penstock_executor_executions_total", "Programs that were run.", ["outcome", "profile"])
SECONDS = Histogram(
    "penstock_executor_execution_seconds", "Time of one program in its slot.", ["profile"], buckets=_SECONDS
)


class Executor:
    """Run programs in one tier: ``profiles`` are kept warm, ``slots`` run at a time, and an interpreter is replaced
    after ``recycle_after`` programs.
    """

    def __init__(self, isolation: Isolation, profiles: tuple[str, ...], slots: int, recycle_after: int) -> None:
        self.tier = isolation.tier
        self._zygotes = {profile: Zygotes(isolation, profile, recycle_after) for profile in profiles}
        for outcome, profile in itertools.product(Outcome, profiles):
            EXECUTIONS.labels(outcome.value, profile)  # create the series at 0
        self._slots = Slots(slots)
        self._sessions = asyncio.Semaphore(SESSIONS_PER_SLOT * slots)

    async def start(self) -> None:
        """Warm every interpreter. Raises ZygoteLost."""
        for zygotes in self._zygotes.values():
            await zygotes.take()

    async def close(self) -> None:
        await self._slots.close()
        for zygotes in self._zygotes.values():
            await zygotes.close()

    async def run(self, job: Job) -> Execution:
        """Run ``job``; cancellation kills its program."""
        if job.profile not in self._zygotes:
            return self._unknown(job.profile)
        async with self._slots.claim() as claim:
            execution = await self._run(job, claim)
        return self._counted(execution, job.profile)

    def session(self) -> Session:
        """Return a session, which starts with its first cell, once there is room for it; close it."""
        return Session(self.tier, self._sessions)

    async def run_cell(self, session: Session, cell: Cell) -> Execution:
        """Run a cell after the earlier ones of its session; cancellation ends the session's interpreter."""
        if cell.profile not in self._zygotes:
            return self._unknown(cell.profile)
        started_s = time.monotonic()
        async with session.turn(), self._slots.claim(session.core) as claim:
            try:
                execution = await session.run(cell, self._zygotes[cell.profile], claim)
            except (ZygoteLost, OSError) as error:
                execution = self._lost(error, started_s)
        return self._counted(execution, cell.profile)

    def _counted(self, execution: Execution, profile: str) -> Execution:
        EXECUTIONS.labels(execution.outcome.value, profile).inc()
        SECONDS.labels(profile).observe(execution.wall_s)
        return execution

    async def _run(self, job: Job, claim: Claim) -> Execution:
        zygotes = self._zygotes[job.profile]
        started_s = time.monotonic()
        try:
            zygote = await zygotes.take()
            run = claim.program = _Run(zygote, job, claim.core)
            try:
                return await run.result(self.tier)
            finally:
                if not await run.end():
                    await zygotes.discard(zygote)
        except (ZygoteLost, OSError) as error:
            return self._lost(error, started_s)

    def _lost(self, error: Exception, started_s: float) -> Execution:
        log.warning("a program could not run", extra={"reason": str(error)})
        return dataclasses.replace(self._failed(str(error)), wall_s=time.monotonic() - started_s)

    def _unknown(self, profile: str) -> Execution:
        known = ", ".join(self._zygotes)
        return self._failed(
            f"expected a profile of {known}, found {profile[:40]!r}: start the executor with the settings of the run"
        )

    def _failed(self, detail: str) -> Execution:
        return Execution(Outcome.SANDBOX_ERROR, "", (), detail, None, 0.0, 0.0, 0, self.tier)


class _Run(RunningProgram):
    def __init__(self, zygote: ZygoteProcess, job: Job, core: int) -> None:
        self._job = job
        given = (job.stdin or "").encode(errors="surrogatepass")
        program = {"code": job.code, "calls": [dataclasses.asdict(call) for call in job.calls]}
        files_bytes = job.limits.file_bytes + len(job.stdin or "") + len(job.code)
        with sealed(given) as stdin:
            super().__init__(zygote, program, stdin, job.limits, core, files_bytes)

    async def result(self, tier: str) -> Execution:
        await self.until(self.ended)
        ended = await self.gone()
        report = read_report(bytes(self.report.data), len(self._job.calls))
        outcome, detail = outcome_of(ended, report, self._job.limits, len(self._job.calls), self.killed)
        return Execution(
            outcome=outcome,
            stdout=self.output.data.decode(errors="replace"),
            values=report.values[: len(self._job.calls)],
            detail=detail,
            exit_status=ended.status,
            wall_s=ended.wall_s,
            cpu_s=ended.cpu_s,
            peak_bytes=ended.peak_bytes,
            tier=tier,
        )
