"""A forked program: its pipes, its deadline and its end.

::

    sealed memory file: the program ──▶ zygote ──▶ child
    pipes: output, report           ◀───────────────┘
      ├── output limit exceeded     killed: output_limit
      ├── deadline                  killed: timeout, or sandbox_error if others had its core most of the time
      └── ended                     its wait status
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.services.reward.executor.slots import Usage
from penstock.services.reward.executor.verdict import Ended
from penstock.services.reward.executor.zygote_process import ZygoteLost, ZygoteProcess
from penstock.shared.executor.protocol import Limits, Outcome

REACTS_WITHIN_S = 10.0
"""Deadline for a zygote to report the end of a killed child."""
LONGEST = 10
"""Limit as a multiple of ``wall_s``, including waits for the core."""
_READ_BYTES = 1 << 16
_ASK_AGAIN_S = 0.01
_REPORT_EXTRA_BYTES = 4096
_NOTHING = Usage(0.0, 0.0, 0)


class RunningProgram:
    """``files_bytes``: what its files, program and input may take, beside its memory."""

    def __init__(
        self, zygote: ZygoteProcess, program: Mapping[str, Any], stdin: int, limits: Limits, core: int, files_bytes: int
    ) -> None:
        self._zygote, self._limits, self._files_bytes = zygote, limits, files_bytes
        self.killed: tuple[Outcome, str] | None = None
        over = f"wrote more than {limits.output_bytes} bytes"
        with contextlib.ExitStack() as theirs:
            payload = theirs.enter_context(sealed(json.dumps(program).encode()))
            self.output = Pipe(limits.output_bytes, lambda: self._kill(Outcome.OUTPUT_LIMIT, over), lambda: None)
            theirs.callback(self.output.close_writer)
            room = limits.output_bytes + _REPORT_EXTRA_BYTES
            flood = lambda: self._kill(Outcome.OUTPUT_LIMIT, f"its values: {over}")  # noqa: E731
            self.report = Pipe(room, flood, self.heard)
            theirs.callback(self.report.close_writer)
            try:
                descriptors = (payload, stdin, self.output.writer, self.report.writer)
                self._number, self.ended = zygote.put(_bounds(limits), core, descriptors)
            except BaseException:
                self._close()
                raise

    def heard(self) -> None:
        """Note that its report has become longer."""

    async def until(self, done: "asyncio.Future[Any]", since: Usage = _NOTHING) -> None:
        """Wait for ``done`` or its end, after ``wall_s`` more than ``since`` by killing it. Raises ZygoteLost."""
        wall_s = left_s = self._limits.wall_s
        over = Outcome.TIMEOUT, f"ran longer than {wall_s:g} s"
        either = {done, self.ended}
        while not any(each.done() for each in either) and left_s > 0:
            await asyncio.wait(either, timeout=max(left_s, _ASK_AGAIN_S), return_when=asyncio.FIRST_COMPLETED)
            usage = await self.usage()
            if usage is None:
                break
            left_s = wall_s - (usage.charged_s - since.charged_s)
            if usage.held_s - since.held_s >= LONGEST * wall_s:
                left_s, over = 0.0, (Outcome.SANDBOX_ERROR, f"did not end within {LONGEST * wall_s:g} s")
        if not any(each.done() for each in either) and left_s <= 0:
            self._kill(*over)
            await self.die()
        if not any(each.done() for each in either):
            raise ZygoteLost(f"the warm interpreter did not end a program within {REACTS_WITHIN_S:g} s")

    async def die(self) -> None:
        """Wait for the end of a killed program, if it ends."""
        await asyncio.wait([self.ended], timeout=REACTS_WITHIN_S)

    async def gone(self) -> Ended:
        """Return how it ended, once all that it wrote is read. Raises ZygoteLost."""
        ended = self.ended.result()
        await asyncio.gather(self.output.closed, self.report.closed)
        return ended

    async def end(self) -> bool:
        """Kill the program if it runs; return False if its end is not confirmed."""
        try:
            self._zygote.tell(self._number, "kill")
            done, _ = await asyncio.wait([self.ended], timeout=REACTS_WITHIN_S)
            return bool(done) and not self._zygote.lost
        finally:
            self._close()

    async def usage(self) -> Usage | None:
        if self.ended.done():
            return None
        usage = await self._zygote.usage(self._number, self.ended, REACTS_WITHIN_S)
        return usage and dataclasses.replace(usage, resident_bytes=usage.resident_bytes + self._files_bytes)

    def suspend(self) -> None:
        self._zygote.tell(self._number, "suspend")

    def resume(self) -> None:
        self._zygote.tell(self._number, "resume")

    def _kill(self, outcome: Outcome, detail: str) -> None:
        self.killed = self.killed or (outcome, detail)
        self._zygote.tell(self._number, "kill")

    def _close(self) -> None:
        self.output.close()
        self.report.close()


class Pipe:
    """What a program writes, up to ``limit`` bytes."""

    def __init__(self, limit: int, over: Callable[[], None], heard: Callable[[], None]) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._limit = limit
        self._over, self._heard = over, heard
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

    def take(self) -> bytes:
        """Return what was written until now, and forget it."""
        while self._reader >= 0 and self._read():
            pass
        taken = bytes(self.data)
        self.data.clear()
        return taken

    def _read(self) -> bool:
        try:
            part = os.read(self._reader, _READ_BYTES)
        except BlockingIOError:
            return False
        self.data += part
        if len(self.data) > self._limit:
            del self.data[self._limit :]
            self._over()
            self.close()
        elif not part:
            self.close()
        else:
            self._heard()
        return bool(part)


@contextlib.contextmanager
def sealed(data: bytes) -> Iterator[int]:
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


def _bounds(limits: Limits) -> dict[str, int]:
    return {
        "cpu_s": math.ceil(limits.cpu_s),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "files": limits.files,
    }
