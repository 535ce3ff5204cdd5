"""Supervise a run's processes until it ends, then stop them in order; ``<run folder>/up.json`` lists them."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from penstock.services.up import process_tree
from penstock.services.up.plan import (
    EXECUTOR,
    PROMETHEUS,
    STOP_ORDER,
    STOP_ORDER_AT_ONCE,
    STOP_ORDER_ENDED,
    TRACKING,
    VALKEY,
    ProcessPlan,
)
from penstock.services.up.process import Child, ChildState, ProcessFailure, Restarts, Surroundings
from penstock.shared.bus.client import connection
from penstock.shared.errors import BusUnavailable, SettingsError
from penstock.shared.files.durable import UpdatedFile, no_space
from penstock.shared.tasks import beside, together
from penstock.shared.text.redaction import redact

_BUS_START_S = 30.0
_BUS_ANSWER_S = 5.0
_WORTH_TELLING_S = 3.0
_LOOK_EVERY_S = 0.5
_ROTATE_EVERY_S = 10.0
SILENT_S = 5.0
"""Time without an answer of a process without heartbeats after which that is reported."""
_HTTP = b"GET /healthz HTTP/1.0\r\n\r\n"
_QUESTIONS = {VALKEY: b"PING\r\n", EXECUTOR: _HTTP, PROMETHEUS: _HTTP}


INTERRUPTED, TERMINATED = 130, 143
"""Codes of an ending by SIGINT, and by SIGTERM or SIGHUP."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    code: int
    sentence: str = ""


class Supervisor:
    def __init__(
        self,
        run_folder: Path,
        plans: Sequence[ProcessPlan],
        bus_url: str,
        restarts: Restarts,
        tell: Callable[[str], None],
        finished: Callable[[], Awaitable[bool]],
        step: Callable[[], Awaitable[int | None]],
    ) -> None:
        """``step`` returns the run's step, or None while it is paused."""
        self._run_folder = run_folder
        self._bus_url = bus_url
        self._tell = tell
        self._step = step
        self._ending: Ending | None = None
        self._ended = asyncio.Event()
        self._starting = asyncio.Lock()
        self._table = UpdatedFile(run_folder / "up.json", tell)
        logs = run_folder / "logs"
        logs.mkdir(exist_ok=True)
        around = Surroundings(
            logs=logs,
            restarts=restarts,
            starting=self._starting,
            changed=self._write_table,
            tell=tell,
            fail=self._fail,
            finished=finished,
            step=self._step_without,
            replicas=lambda service: [child for child in self.children if child.plan.service == service],
        )
        self.children = [Child(plan, around) for plan in plans]

    def end(self, ending: Ending) -> None:
        """Stop in order; the first call sets the ending."""
        self._ending = self._ending or ending
        self._ended.set()

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    def mark_ready(self, name: str, since_s: float) -> None:
        for child in self.children:
            if child.plan.name == name and since_s >= child.started_at_s:
                child.mark_ready()

    @property
    def is_ending(self) -> bool:
        return self._ended.is_set()

    @property
    def was_ready(self) -> bool:
        return all(child.was_ready for child in self.children)

    async def run(self) -> Ending:
        async with asyncio.TaskGroup() as tasks:
            bus = [child for child in self.children if child.plan.service == VALKEY]
            runs = {child: tasks.create_task(child.run()) for child in bus}
            if not bus or await self._bus_answers(bus[0]):
                runs |= {child: tasks.create_task(child.run()) for child in self.children if child not in runs}
            async with beside(self._end_orphans(), self._look_for_silent(), self._rotate_logs(), self._table.run()):
                await self._ended.wait()
                await self._stop_in_order(runs)
        process_tree.end_orphans(())
        self._write_table()
        assert self._ending is not None
        return self._ending

    async def _stop_in_order(self, runs: dict[Child, asyncio.Task[None]]) -> None:
        for services in self._stop_order():
            stage = [child for child in runs if child.plan.service in services]
            for child in stage:
                child.stop()
            since_s = time.monotonic()
            waiting = asyncio.gather(*(runs[child] for child in stage))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WORTH_TELLING_S):
                    await asyncio.shield(waiting)
            if not waiting.done():
                self._tell_what_is_waited_for([child for child in stage if not runs[child].done()])
            await waiting
            if time.monotonic() - since_s > _WORTH_TELLING_S:
                self._tell(
                    f"{', '.join(child.plan.name for child in stage)}: stopped after {time.monotonic() - since_s:.0f} s"
                )

    def _stop_order(self) -> Sequence[Sequence[str]]:
        if self._ending is not None and self._ending.code == 0:
            return STOP_ORDER_ENDED
        if not any(child.plan.service == VALKEY for child in self.children):
            return STOP_ORDER
        if full := no_space(self._run_folder):
            self._tell(
                f"{full}, so that the bus takes no work back: all processes stop at once, and a resume does it again"
            )
            for child in (child for child in self.children if child.plan.service != VALKEY):
                child.drop_work()
        is_terminated = self._ending is not None and self._ending.code == TERMINATED
        return STOP_ORDER_AT_ONCE if full or is_terminated else STOP_ORDER

    def _tell_what_is_waited_for(self, children: Sequence[Child]) -> None:
        longest_s = max(child.stop_s for child in children)
        self._tell(
            f"waiting up to {longest_s:.0f} s for {', '.join(child.plan.name for child in children)} to finish work or "
            "give it back (bus.drain_s)"
        )

    async def _bus_answers(self, child: Child) -> bool:
        try:
            async with asyncio.timeout(_BUS_START_S):
                while not self._ended.is_set():
                    try:
                        await connection.probe(self._bus_url)
                    except BusUnavailable:
                        if child.last_death:
                            self._fail(ProcessFailure(self._damaged_bus(child), 1))
                            return False
                        await asyncio.sleep(0.05)
                    else:
                        child.mark_ready()
                        return True
        except SettingsError as error:
            self._fail(ProcessFailure(str(error), 2))
        except TimeoutError:
            self._fail(
                ProcessFailure(f"the embedded bus did not respond within {_BUS_START_S:.0f} s; its log: {child.log}", 1)
            )
        return False

    def _damaged_bus(self, child: Child) -> str:
        data = self._run_folder / "valkey"
        resume = f"penstock up --resume {shlex.quote(str(self._run_folder))}"
        return (
            f"the embedded bus ended while it read its data ({child.last_death}). If {data} is damaged, move it away (mv {data} "
            f"{data}-damaged) and resume: {resume}. The run continues from its newest checkpoint; only what the bus alone had is "
            "lost: steps since then and groups in flight, which are made again and counted"
        )

    async def _step_without(self, service: str) -> int | None:
        """Return the run's step, or None if it waits for something other than ``service``, or needs no ``service``."""
        if service in (TRACKING, PROMETHEUS) or no_space(self._run_folder):
            return None
        if service != VALKEY:
            try:
                async with asyncio.timeout(_BUS_ANSWER_S):
                    await connection.probe(self._bus_url)
            except (BusUnavailable, SettingsError, TimeoutError):
                return None
        return await self._step()

    async def _look_for_silent(self) -> None:
        """Ask processes without heartbeats whether they are ready, and whether they still answer."""
        asked = [child for child in self.children if child.plan.service in _QUESTIONS]
        await together(map(self._ask_forever, asked))

    async def _ask_forever(self, child: Child) -> None:
        is_silent = False
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if child.state not in (ChildState.STARTING, ChildState.READY):
                continue
            pid, answers = child.pid, await _answers(child.plan)
            if answers and child.plan.service != VALKEY:  # which the start of a run waits for
                child.mark_ready()
            if answers != is_silent or child.state is not ChildState.READY or child.pid != pid:
                continue
            is_silent = not answers
            why = no_space(self._run_folder) or "it is frozen, or short of processor time"
            said = "answers again" if answers else f"has not answered for {SILENT_S:.0f} s: {why}"
            self._tell(f"{child.plan.name} {said}")

    async def _rotate_logs(self) -> None:
        while True:
            for child in self.children:
                child.rotate_log()
            await asyncio.sleep(_ROTATE_EVERY_S)

    async def _end_orphans(self) -> None:
        """End orphans, such as a killed trainer's ranks."""
        while True:
            await asyncio.sleep(1.0)
            async with self._starting:
                process_tree.end_orphans([child.pid for child in self.children if child.pid is not None])

    def _fail(self, failure: ProcessFailure) -> None:
        if self._ending is None or not self._ending.sentence:
            self._tell(f"stopping: {failure.sentence}")  # at once: starting processes end slowly
        self.end(Ending(failure.code, failure.sentence))

    def _write_table(self) -> None:
        table = {
            "pid": os.getpid(),
            "bus": redact(self._bus_url),
            "processes": [_row(child) for child in self.children if child.state is not ChildState.ENDED],
        }
        self._table.write(json.dumps(table, indent=2) + "\n")


async def _answers(plan: ProcessPlan) -> bool:
    """Whether a process without heartbeats listens, and answers within ``SILENT_S``, whatever it says."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(SILENT_S), contextlib.AsyncExitStack() as closing:
            if plan.socket is not None:
                reader, writer = await asyncio.open_unix_connection(plan.socket)
                closing.callback(writer.close)
            if plan.address is not None:
                reader, writer = await asyncio.open_connection(*plan.address)
                closing.callback(writer.close)
            writer.write(_QUESTIONS[plan.service])
            return bool(await reader.read(1))
    return False


def _row(child: Child) -> dict[str, str | int | float | None]:
    return {
        "name": child.plan.name,
        "service": child.plan.service,
        "pid": child.pid,
        "state": child.state.value,
        "started_at_s": child.started_at_s,
        "restarts": child.restarts,
        "log": str(child.log),
    }
