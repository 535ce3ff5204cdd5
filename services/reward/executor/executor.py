"""Run jobs: slots, warm interpreters, pipes, deadlines and verdicts.

::

    run(job) ──▶ a slot ──▶ sealed memory files: program, input ──▶ zygote ──▶ child
                              pipes: output, report ◀───────────────────────────┘
                                ├── output limit exceeded     killed: output_limit
                                ├── deadline                  killed: timeout
                                └── ended                     verdict.outcome_of(wait status, …)

A dead or hanging zygote is replaced; its programs end as ``sandbox_error``.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator

from prometheus_client import Counter, Histogram

from penstock.services.reward.executor.isolation import Isolation
from penstock.services.reward.executor.protocol import Execution, Job, Limits, Outcome
from penstock.services.reward.executor.slots import Claim, Slots, Usage
from penstock.services.reward.executor.verdict import Ended, outcome_of, read_report
from penstock.services.reward.executor.zygote_process import ZygoteLost, ZygoteProcess, Zygotes

log = logging.getLogger(__name__)

_SECONDS = (0.002, 0.004, 0.006, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
EXECUTIONS = Counter("penstock_executor_executions_total", "Programs that were run.", ["outcome", "profile"])
SECONDS = Histogram(
    "penstock_executor_execution_seconds", "Time of one program in its slot.", ["profile"], buckets=_SECONDS
)
_REACTS_WITHIN_S = 10.0
"""Deadline for a zygote to report the end of a killed child."""
_READ_BYTES = 1 << 16
LONGEST = 10
"""Limit as a multiple of ``wall_s``, including waits for the core."""
_ASK_AGAIN_S = 0.01
_REPORT_EXTRA_BYTES = 4096


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
            known = ", ".join(self._zygotes)
            return self._failed(
                f"expected a profile of {known}, found {job.profile[:40]!r}: start the executor with the settings of the run"
            )
        async with self._slots.claim() as claim:
            execution = await self._run(job, claim)
        EXECUTIONS.labels(execution.outcome.value, job.profile).inc()
        SECONDS.labels(job.profile).observe(execution.wall_s)
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
            log.warning("a program could not run", extra={"reason": str(error)})
            return dataclasses.replace(self._failed(str(error)), wall_s=time.monotonic() - started_s)

    def _failed(self, detail: str) -> Execution:
        return Execution(Outcome.SANDBOX_ERROR, "", (), detail, None, 0.0, 0.0, 0, self.tier)


class _Run:
    def __init__(self, zygote: ZygoteProcess, job: Job, core: int) -> None:
        self._zygote = zygote
        self._job = job
        self._killed: tuple[Outcome, str] | None = None
        limits = job.limits
        self._files_bytes = limits.file_bytes + len(job.stdin or "") + len(job.code)
        over = f"wrote more than {limits.output_bytes} bytes"
        with contextlib.ExitStack() as theirs:
            payload = theirs.enter_context(_sealed(_payload(job)))
            stdin = theirs.enter_context(_sealed((job.stdin or "").encode(errors="surrogatepass")))
            self._output = _Pipe(limits.output_bytes, lambda: self._kill(Outcome.OUTPUT_LIMIT, over))
            theirs.callback(self._output.close_writer)
            room = limits.output_bytes + _REPORT_EXTRA_BYTES
            self._report = _Pipe(room, lambda: self._kill(Outcome.OUTPUT_LIMIT, f"its values: {over}"))
            theirs.callback(self._report.close_writer)
            try:
                descriptors = (payload, stdin, self._output.writer, self._report.writer)
                self._number, self._ended = zygote.put(_bounds(limits), core, descriptors)
            except BaseException:
                self._close()
                raise

    async def result(self, tier: str) -> Execution:
        ended = await self._until_gone()
        await asyncio.gather(self._output.closed, self._report.closed)
        report = read_report(bytes(self._report.data), len(self._job.calls))
        outcome, detail = outcome_of(ended, report, self._job.limits, len(self._job.calls), self._killed)
        return Execution(
            outcome=outcome,
            stdout=self._output.data.decode(errors="replace"),
            values=report.values[: len(self._job.calls)],
            detail=detail,
            exit_status=ended.status,
            wall_s=ended.wall_s,
            cpu_s=ended.cpu_s,
            peak_bytes=ended.peak_bytes,
            tier=tier,
        )

    async def end(self) -> bool:
        """Kill the program if it runs; return False if its end is not confirmed."""
        try:
            self._zygote.tell(self._number, "kill")
            done, _ = await asyncio.wait([self._ended], timeout=_REACTS_WITHIN_S)
            return bool(done) and not self._zygote.lost
        finally:
            self._close()

    async def usage(self) -> Usage | None:
        if self._ended.done():
            return None
        usage = await self._zygote.usage(self._number, self._ended, _REACTS_WITHIN_S)
        return usage and dataclasses.replace(usage, resident_bytes=usage.resident_bytes + self._files_bytes)

    def suspend(self) -> None:
        self._zygote.tell(self._number, "suspend")

    def resume(self) -> None:
        self._zygote.tell(self._number, "resume")

    async def _until_gone(self) -> Ended:
        wall_s = left_s = self._job.limits.wall_s
        over = f"ran longer than {wall_s:g} s"
        while not self._ended.done() and left_s > 0:
            await asyncio.wait([self._ended], timeout=max(left_s, _ASK_AGAIN_S))
            usage = await self.usage()
            if usage is None:
                break
            left_s = wall_s - usage.charged_s
            if usage.held_s >= LONGEST * wall_s:
                left_s, over = 0.0, f"did not end within {LONGEST * wall_s:g} s"
        if not self._ended.done() and left_s <= 0:
            self._kill(Outcome.TIMEOUT, over)
            await asyncio.wait([self._ended], timeout=_REACTS_WITHIN_S)
        if not self._ended.done():
            raise ZygoteLost(f"the warm interpreter did not end a program within {_REACTS_WITHIN_S:g} s")
        return self._ended.result()

    def _kill(self, outcome: Outcome, detail: str) -> None:
        self._killed = self._killed or (outcome, detail)
        self._zygote.tell(self._number, "kill")

    def _close(self) -> None:
        self._output.close()
        self._report.close()


class _Pipe:
    def __init__(self, limit: int, over: Callable[[], None]) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._limit = limit
        self._over = over
        self._loop = asyncio.get_running_loop()
        self.data = bytearray()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done when all writers are gone or the limit is exceeded."""
        self._loop.add_reader(self._reader, self._read)

    def close_writer(self) -> None:
        os.close(self.writer)

    def close(self) -> None:
        if self._reader >= 0:
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1
        if not self.closed.done():
            self.closed.set_result(None)

    def _read(self) -> None:
        try:
            part = os.read(self._reader, _READ_BYTES)
        except BlockingIOError:
            return
        self.data += part
        if len(self.data) > self._limit:
            del self.data[self._limit :]
            self._over()
            self.close()
        elif not part:
            self.close()


@contextlib.contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def _payload(job: Job) -> bytes:
    return json.dumps({"code": job.code, "calls": [dataclasses.asdict(call) for call in job.calls]}).encode()


def _bounds(limits: Limits) -> dict[str, int]:
    return {
        "cpu_s": math.ceil(limits.cpu_s),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "files": limits.files,
    }
