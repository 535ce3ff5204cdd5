"""One supervised process: started, restarted, stopped.

::

    starting ──▶ ready ──▶ (dies) ──▶ waiting ──▶ starting …      waits double up to a cap; a long life resets them
        │                                  │
        └──────────── stop ────────────────┴──▶ stopping ──▶ ended

A never-ready process ends the run if it reports wrong settings or dies ``give_up`` times in a row. A process that was
ready ends it if it dies on its own ``stuck`` times in a row while no step is trained.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from penstock.services.up import process_tree
from penstock.services.up.plan import ProcessPlan
from penstock.shared.backoff import Backoff
from penstock.shared.process.children import kill_group, reap
from penstock.shared.tasks import beside
from penstock.shared.text.redaction import redacted

WRONG_SETTINGS = 2
_LAST_LINES = 15
_LONGEST_LINE = 300
_LOG_BYTES = 32 << 20
_UNREADY_STOP_S = 5.0
_SENT = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals of others: the kernel out of memory, an operator."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b")
_GROUP_MARGIN = re.compile(r"^ *\+-[-+ \d]*$|^ +\| ")
"""Around the errors of an exception group."""


class ChildState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "restarting"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclasses.dataclass(frozen=True, slots=True)
class Restarts(Backoff):
    first_s: float = 0.25
    longest_s: float = 15.0
    well_after_s: float = 20.0
    """Lifetime of a ready process that resets the wait."""
    give_up: int = 5
    """Consecutive deaths of a never-ready process that end the run."""
    stuck: int = 10
    """Consecutive deaths of a process that was ready, without a trained step, that end the run. A group that kills its
    process is buried after 7."""
    long_life_s: float = 600.0
    """Lifetime after which this count begins again."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessFailure:
    sentence: str
    code: int


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    logs: Path
    restarts: Restarts
    starting: asyncio.Lock
    """Held during a start, against mistaking the process for an orphan."""
    changed: Callable[[], None]
    tell: Callable[[str], None]
    fail: Callable[[ProcessFailure], None]
    finished: Callable[[], Awaitable[bool]]
    """Whether the run is done, so that exit code 0 is an end."""
    step: Callable[[str], Awaitable[int | None]]
    """Return the run's step, or None if it waits for something other than a process of this service."""
    replicas: Callable[[str], "Sequence[Child]"]
    """Return the processes of a service."""


class Child:
    def __init__(self, plan: ProcessPlan, around: Surroundings) -> None:
        self.plan = plan
        self.state = ChildState.STARTING
        self.pid: int | None = None
        self.started_at_s = 0.0
        self.restarts = 0
        self.last_death = ""
        self.log = around.logs / f"{plan.name}.log"
        self._around = around
        self._failures = 0
        self._deaths = 0
        self._deaths_at: int | None = None
        self._was_ready = False
        self._is_ready = False
        self._log_start = 0
        self._asked = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def was_ready(self) -> bool:
        return self._was_ready

    @property
    def stop_s(self) -> float:
        """How long it may take to stop; what is not ready has no work to finish or give back."""
        return self.plan.stop_s if self._is_ready else min(_UNREADY_STOP_S, self.plan.stop_s)

    def drop_work(self) -> None:
        """Do not wait for its work, which nothing can take back, when it is stopped."""
        self._is_ready = False

    def deaths_at(self, step: int) -> int:
        """Return the number of its own deaths in a row since ``step``, each after a short life."""
        return self._deaths if self._deaths_at == step else 0

    def mark_ready(self) -> None:
        if self.state is ChildState.STARTING:
            self._was_ready = self._is_ready = True
            self._set(ChildState.READY)

    async def run(self) -> None:
        while not self._asked.is_set():
            code = await self._live()
            if self._asked.is_set() or (code == 0 and await self._around.finished()):
                break
            failure = await self._judge(code)
            if self._asked.is_set():
                break
            if failure is not None:
                self._around.fail(failure)
                break
            await self._wait_before_restart(code)
        self._set(ChildState.ENDED)

    def stop(self) -> None:
        self._asked.set()

    def rotate_log(self, most_bytes: int = _LOG_BYTES) -> None:
        """Move the content of a log above ``most_bytes`` to ``<name>.log.1``, in place of what is there.

        The process holds the log open and continues to append to it.
        """
        before = self.log.with_name(f"{self.log.name}.1")
        try:
            if self.log.stat().st_size > most_bytes:
                with self.log.open("r+b") as log, before.open("wb") as moved:
                    shutil.copyfileobj(log, moved)
                    log.truncate(0)
                self._log_start = 0
        except OSError:  # a full disk, or no log
            return

    def kill(self) -> None:
        self._asked.set()
        self._hurry.set()
        if self.pid is not None:
            kill_group(self.pid)

    # ---------------------------------------------------------------- one life

    async def _live(self) -> int:
        self._is_ready = False
        if self.plan.socket is not None:
            self.plan.socket.unlink(missing_ok=True)
        async with self._around.starting:
            with self._open_log() as log:
                self._log_start = log.tell()
                process = await self._start(log)
            self.pid, self.started_at_s = process.pid, time.time()
        self._set(ChildState.STARTING)
        try:
            code = await self._until_gone(process)
        finally:
            kill_group(process.pid)  # its remaining children
            await reap(process)  # also when cancelled: else asyncio reports a child that it does not know
        self.pid = None
        self._around.changed()
        return code

    def _open_log(self) -> BinaryIO:
        try:
            return self.log.open("ab")
        except OSError as error:
            self._around.tell(f"{self.plan.name} runs without a log: {self.log}: {error.strerror or error}")
            return Path(os.devnull).open("ab")

    async def _start(self, log: BinaryIO) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.plan.command,
            env=dict(self.plan.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=process_tree.dies_with_parent(),
        )

    async def _until_gone(self, process: asyncio.subprocess.Process) -> int:
        async with beside(self._stop_when_asked(process)):
            return await process.wait()

    async def _stop_when_asked(self, process: asyncio.subprocess.Process) -> None:
        await self._asked.wait()
        self._set(ChildState.STOPPING)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)  # not process.send_signal, which reaps it before asyncio can
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.stop_s):
                await self._hurry.wait()
        kill_group(process.pid)

    async def _judge(self, code: int) -> ProcessFailure | None:
        """Count a death; return why the run fails, or None to restart."""
        lived_s = time.time() - self.started_at_s
        well = self._is_ready and lived_s >= self._around.restarts.well_after_s
        self._failures = 1 if well else self._failures + 1
        if self._was_ready:
            return await self._judge_stuck(code, lived_s)
        if code > 0 and (sentence := self._sentence()):
            return ProcessFailure(sentence, WRONG_SETTINGS)
        if self._failures < self._around.restarts.give_up:
            return None
        return ProcessFailure(
            f"{self.plan.name} stopped {self._failures} times before it was ready (last: {how(code)}); the end of its log, "
            f"{self.log}:\n{self._tail()}",
            1,
        )

    async def _judge_stuck(self, code: int, lived_s: float) -> ProcessFailure | None:
        if not is_own(code):
            return None
        step = await self._around.step(self.plan.service)
        if step is None or step != self._deaths_at or lived_s >= self._around.restarts.long_life_s:
            self._deaths, self._deaths_at = 0, step
        self._deaths += 1
        replicas = self._around.replicas(self.plan.service)
        if step is None or any(replica.deaths_at(step) < self._around.restarts.stuck for replica in replicas):
            return None
        others = f", as did the other {self.plan.service} processes" if len(replicas) > 1 else ""
        return ProcessFailure(
            f"{self.plan.name} stopped {self._deaths} times in a row (last: {how(code)}){others}, and no step was trained "
            f"after step {step}: remove the cause, then resume the run (penstock up --resume {shlex.quote(str(self._around.logs.parent))}); "
            f"the end of its log, {self.log}:\n{self._tail()}",
            1,
        )

    async def _wait_before_restart(self, code: int) -> None:
        wait_s = self._around.restarts.wait_s(self._failures)
        self.restarts += 1
        self.last_death = self._cause(code)
        self._set(ChildState.WAITING)
        self._around.tell(f"{self.plan.name} stopped ({self.last_death}); starts again in {wait_s:.1f} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._asked.wait()

    def _set(self, state: ChildState) -> None:
        self.state = state
        self._around.changed()

    def _written(self) -> list[str]:
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 100_000))
            text = redacted(log.read().decode(errors="replace"))
        return [line for line in text.splitlines() if line.strip()]

    def _cause(self, code: int) -> str:
        """Describe a death for the console by its settings error, its exception, or the last line of its log."""
        if not is_own(code):
            return how(code)
        if code > 0 and (sentence := self._sentence()):
            return sentence
        launcher = f'"replica": "{self.plan.name}.launcher"'  # its last line says only that a rank ended
        lines = (_GROUP_MARGIN.sub("", line) for line in reversed(self._written()) if launcher not in line)
        last = next(filter(None, lines), "")
        if code > 0 and _EXCEPTION.match(last):
            return _cut(last)
        return f"{how(code)}; the last line of its log: {_cut(last)}" if last else how(code)

    def _sentence(self) -> str:
        """Return its settings error, from lines `penstock <service>: …`."""
        said = f"penstock {self.plan.service}:"
        lines = (line.removeprefix(said).strip() for line in self._written() if line.startswith(said))
        return "\n".join(dict.fromkeys(lines))

    def _tail(self) -> str:
        return "\n".join(f"  {_cut(line)}" for line in self._written()[-_LAST_LINES:]) or "  (nothing)"


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"


def is_own(code: int) -> bool:
    """Return whether a process died on its own: not in order, and not by another's signal to it or its ranks.

    >>> [is_own(code) for code in (1, 2, -11, 134, 0, -9, 137, -15, 143)]
    [True, True, True, True, False, False, False, False, False]
    """
    return code != 0 and (-code if code < 0 else code - 128) not in _SENT


def how(code: int) -> str:
    """Describe an exit code.

    >>> how(-9), how(1), how(137)
    ('SIGKILL', 'exit code 1', 'exit code 137 (SIGKILL)')
    """
    number = -code if code < 0 else code - 128
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    if code >= 0:
        return f"exit code {code} ({name})" if name else f"exit code {code}"
    return name or f"signal {number}"
