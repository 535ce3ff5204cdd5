"""Call a sink's process; kill it when it is late, and start another for the next batch."""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.services.tracking.points import Point
from penstock.services.tracking.sinks.sink import TrackedRun
from penstock.shared.process.children import kill_group, reap
from penstock.shared.settings import ENVIRONMENT_PREFIX

_ANSWER_BYTES = 1 << 20


class SinkFailure(Exception):
    """A batch was not acknowledged; it must be sent again."""


class SinkClient:
    """One sink. ``timeout_s``: an answer that is later counts as a failure, and the process is killed."""

    def __init__(self, name: str, run: TrackedRun, timeout_s: float) -> None:
        self._name = name
        self._run = run
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def write(self, points: Sequence[Point], state: Mapping[str, Any]) -> dict[str, Any]:
        """Deliver points and return the sink's new state. Raises SinkFailure."""
        if self._process is None:
            await self._start()
        return await self._ask({"points": list(points), "state": dict(state)}, self._timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Let the sink finish its uploads for up to ``timeout_s``, then end its process."""
        if self._process is not None:
            with contextlib.suppress(SinkFailure):
                await self._ask({"close": True}, timeout_s)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and its descendants."""
        process, self._process = self._process, None
        if process is None:
            return
        kill_group(process.pid)
        await reap(process)

    async def _start(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.services.tracking.sink_process", self._name, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)},
                start_new_session=True,
                limit=_ANSWER_BYTES,
            )
        except OSError as error:
            raise SinkFailure(f"its process cannot be started: {error}") from error
        run = {**dataclasses.asdict(self._run), "folder": str(self._run.folder)}
        await self._ask({"run": run}, self._timeout_s)

    async def _ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(json.dumps(question).encode() + b"\n")
        except TimeoutError as error:
            await self.kill()
            raise SinkFailure(f"no answer within {timeout_s:g} s") from error
        except (ConnectionError, ValueError) as error:  # a line that is empty, torn or no JSON: the process died
            await self.kill()
            raise SinkFailure("its process died") from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        if "error" in answer:
            await self.kill()
            raise SinkFailure(str(answer["error"]))
        state: dict[str, Any] = answer["state"]
        return state

    async def _exchange(self, line: bytes) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        await self._process.stdin.drain()
        answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return answer
