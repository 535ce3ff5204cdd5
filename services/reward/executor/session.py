"""A session: one interpreter, confined as any program is, that runs a client's cells in order and keeps their names.

Between cells it is suspended and holds no slot. A cell that exceeds a limit or exits ends the interpreter; the next one
begins with a new one.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator

from prometheus_client import Gauge

from penstock.services.reward.executor.program import RunningProgram
from penstock.services.reward.executor.slots import Claim, Usage
from penstock.services.reward.executor.verdict import ProgramReport, outcome_of
from penstock.services.reward.executor.zygote_process import ZygoteLost, ZygoteProcess, Zygotes
from penstock.shared.executor.protocol import Cell, Execution, Limits, Outcome

SESSIONS = Gauge("penstock_executor_sessions", "Sessions that have begun and not ended.")
_NOTHING = Usage(0.0, 0.0, 0)
_STARTED = ProgramReport(started=True, values=(), error="")
_OUTCOMES = {b"done": Outcome.FINISHED, b"memory": Outcome.MEMORY}


class Session:
    """:meth:`close` it; on one event loop. ``room``: of all sessions, of which it takes one place."""

    def __init__(self, tier: str, room: asyncio.Semaphore) -> None:
        self._tier, self._room = tier, room
        self._cells = asyncio.Lock()
        self._has_room = False
        self._interpreter: _Interpreter | None = None
        self._zygotes: Zygotes | None = None
        self.core = -1

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until earlier cells have ended, the first one for room."""
        async with self._cells:
            if not self._has_room:
                await self._room.acquire()
                self._has_room = True
                SESSIONS.inc()
            yield

    async def run(self, cell: Cell, zygotes: Zygotes, claim: Claim) -> Execution:
        """Run a cell. Raises ZygoteLost or OSError: the session has lost its state."""
        try:
            if self._interpreter is None:
                self.core, self._zygotes = claim.core, zygotes
                self._interpreter = _Interpreter(await zygotes.take(), cell.limits, claim.core)
                await self._interpreter.begin()
            execution = await self._interpreter.run(cell, claim, self._tier)
        except BaseException:
            await self._end()
            raise
        if execution.exit_status is None:
            self._interpreter.suspend()
        else:
            await self._end()
        return execution

    async def _end(self) -> None:
        interpreter, self._interpreter, self.core = self._interpreter, None, -1
        if interpreter is not None and not await interpreter.end():
            assert self._zygotes is not None
            await self._zygotes.discard(interpreter.zygote)

    async def close(self) -> None:
        """Kill its interpreter, after a cell that runs."""
        async with self._cells:
            await self._end()
            if self._has_room:
                self._has_room = False
                self._room.release()
                SESSIONS.dec()


class _Interpreter(RunningProgram):
    """:meth:`begin` it. Its report has one line, and one more a cell."""

    def __init__(self, zygote: ZygoteProcess, limits: Limits, core: int) -> None:
        self.zygote = zygote
        self._line: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        try:
            super().__init__(zygote, {"session": True}, theirs, limits, core, limits.file_bytes)
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)

    def heard(self) -> None:
        if b"\n" in self.report.data and not self._line.done():
            self._line.set_result(None)

    async def begin(self) -> None:
        """Wait until it is confined. Raises ZygoteLost."""
        pipe = os.fdopen(self._ours, "wb", 0)
        self._transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.Protocol, pipe)
        await self.until(self._line)
        said = self.report.take()
        if not said.startswith(b"ready\n"):
            raise ZygoteLost(f"the session could not be started: {said[:200].decode(errors='replace')}")

    async def run(self, cell: Cell, claim: Claim, tier: str) -> Execution:
        """Run a cell. Raises ZygoteLost."""
        before = await self.usage()
        if before is not None:
            claim.usage, claim.program = before, self
            self.resume()
            self.output.take()  # of threads of earlier cells, after those ended
            self.report.take()
            self._line = asyncio.get_running_loop().create_future()
            assert self._transport is not None
            self._transport.write(json.dumps(cell.code).encode() + b"\n")
            await self.until(self._line, before)
        now = await self.usage() or before or _NOTHING
        if self.ended.done():
            await self.gone()
        text = self.output.take().decode(errors="replace")
        if self.killed is not None:  # perhaps only now, for what was read now
            await self.die()
        wall_s = now.held_s - (before or _NOTHING).held_s
        if not self.ended.done():
            outcome = _OUTCOMES.get(self.report.take().partition(b"\n")[0], Outcome.RUNTIME_ERROR)
            return Execution(outcome, text, (), "", None, wall_s, 0.0, now.resident_bytes, tier)
        ended = self.ended.result()
        outcome, detail = outcome_of(ended, _STARTED, cell.limits, 0, self.killed)
        return Execution(outcome, text, (), detail, ended.status, wall_s, ended.cpu_s, ended.peak_bytes, tier)

    async def end(self) -> bool:
        if self._transport is None:
            os.close(self._ours)
        elif not self._transport.is_closing():
            self._transport.abort()
        return await super().end()
