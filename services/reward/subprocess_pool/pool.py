"""A few processes that answer one question at a time, each killed when it is late and replaced when it dies.

::

    ask(question) ──▶ a free process ──▶ its answer
                          ├── late by the question's deadline   killed ──▶ Overdue
                          ├── ``computes``, and computed too long       ──▶ Overdue; a fork of the process goes on
                          │     └── too little in ten times that      killed, the host's fault ──▶ TemporaryError
                          ├── died once                         asked again of a fresh one
                          ├── died twice                        ──▶ Crashed: it is the question
                          ├── cannot be started                 ──▶ TemporaryError
                          └── the asker was cancelled           killed

A process speaks JSON lines (:mod:`child` is its side): ``{"ready": true}`` once, then one answer for each question. The
deadline counts from when the question is put, not from when it began to wait; where questions are computation alone it is
processor time, which the kernel counts, so that a busy host fails nobody. A killed process takes what it started with
it, and is replaced when the next question needs it. This module knows neither what is asked nor what a score is.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence

from prometheus_client import Counter

from shared.bus.messages import Json
from shared.errors import PenstockError, TemporaryError
from shared.process.environment import FOR_PYTHON

log = logging.getLogger(__name__)

RESTARTS = Counter(
    "penstock_reward_process_restarts_total",
    "Killable processes that were replaced, by why: overdue, died, cancelled, or worn (recycled after many questions).",
    ["scorer", "reason"],
)
START_WITHIN_S = 60.0
WORN_AFTER_QUESTIONS = 5_000
"""A process is recycled after so many questions: computer algebra keeps memory."""
PATIENCE = 10
"""A process that has not computed for a question's time within so many times that was stopped, or starved."""


class Overdue(PenstockError):
    """The process was killed because its answer was late."""


class Crashed(PenstockError):
    """Two processes died of one question."""


class NotReady(TemporaryError):
    """The process itself says why it cannot begin."""


class _Place:
    """Room for one process. Empty until it is needed and after the process was killed."""

    def __init__(self, command: Sequence[str], environment: Sequence[str]) -> None:
        self._command = command
        self._environment = (*FOR_PYTHON, *environment)
        self._process: asyncio.subprocess.Process | None = None
        self._questions = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def worn(self) -> bool:
        return self._questions >= WORN_AFTER_QUESTIONS

    async def fill(self) -> None:
        """Start a process if there is none; return when it is ready."""
        if self.alive:
            return
        await self.empty()
        environment = {name: os.environ[name] for name in self._environment if name in os.environ}
        environment.setdefault("OMP_NUM_THREADS", "1")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            async with asyncio.timeout(START_WITHIN_S):
                answer = await self._answer()
        except (OSError, TimeoutError, EOFError) as error:
            await self.empty()
            raise TemporaryError(
                f"expected a process that is ready within {START_WITHIN_S:.0f} s, found {error!r}"
            ) from error
        except BaseException:
            self.kill()
            raise
        if answer.get("ready") is not True:
            await self.empty()
            raise NotReady(str(answer.get("error")))
        self._questions = 0

    async def put(self, question: bytes) -> Mapping[str, Json]:
        """Ask the process.

        Raises:
            EOFError: it died.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._questions += 1
        try:
            self._process.stdin.write(question)
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise EOFError("the process died") from error
        return await self._answer()

    async def _answer(self) -> Mapping[str, Json]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            answer: Mapping[str, Json] = json.loads(line)
        except ValueError as error:  # nothing, half a line, or what is no JSON
            raise EOFError("the process died") from error
        return answer

    def kill(self) -> None:
        """Kill the process, if there is one, and what it started; :meth:`empty` waits for its end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def empty(self) -> None:
        """Kill the process, if there is one, and wait for its end."""
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


class Processes:
    """``count`` processes of one command.

    Args:
        command: what to start; the id of this process is added as its last argument.
        scorer: whose they are, for metrics.
        environment: names of variables that they may see, besides those that Python itself needs.
        computes: a question is computation and nothing else, and the program says so, too (:func:`child.serve`).
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        scorer: str,
        environment: Sequence[str] = (),
        *,
        computes: bool = False,
    ) -> None:
        self._computes = computes
        self._places = [_Place(command, environment) for _ in range(count)]
        self._free: asyncio.LifoQueue[_Place] = asyncio.LifoQueue()
        for place in self._places:
            self._free.put_nowait(place)
        self._scorer = scorer
        self.questions = 0
        """How often a question was put."""

    @property
    def alive(self) -> int:
        """How many processes there are now."""
        return sum(place.alive for place in self._places)

    async def warm(self) -> None:
        """Start them all and wait until they are ready; what cannot be started now is started by the first question.

        Raises:
            NotReady: one says why it cannot begin.
        """
        for found in await asyncio.gather(*(place.fill() for place in self._places), return_exceptions=True):
            if isinstance(found, TemporaryError) and not isinstance(found, NotReady):
                log.warning("process cannot be started", extra={"scorer": self._scorer, "error": str(found)})
            elif found is not None:
                raise found

    async def ask(self, question: dict[str, Json], timeout_s: float) -> Mapping[str, Json]:
        """Put a question to a free process and return its answer.

        Raises:
            Overdue: no answer within ``timeout_s``, which is processor time where the process computes.
            Crashed: two processes died of it.
            TemporaryError: no process can be started, or the host kept it from computing.
        """
        within_s = PATIENCE * timeout_s if self._computes else timeout_s
        line = json.dumps(question | {"cpu_s": timeout_s} if self._computes else question).encode() + b"\n"
        async with self._place() as place:
            for _ in range(2):
                await place.fill()
                self.questions += 1
                try:
                    async with asyncio.timeout(within_s):
                        answer = await place.put(line)
                except EOFError:
                    self._replaced("died")
                except TimeoutError as error:
                    self._replaced("overdue")
                    await place.empty()
                    raise self._late(timeout_s) from error
                except BaseException:
                    self._replaced("cancelled")
                    place.kill()
                    raise
                else:
                    if "overdue" not in answer:
                        return answer
                    self._replaced("overdue")
                    raise Overdue(f"no answer within {timeout_s:g} s")
                await place.empty()
            raise Crashed("two processes died of it")

    def _late(self, timeout_s: float) -> PenstockError:
        if not self._computes:
            return Overdue(f"no answer within {timeout_s:g} s")
        return TemporaryError(
            f"expected a process that computes, found one that stood still for {PATIENCE * timeout_s:g} s"
        )

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[_Place]:
        place = await self._free.get()
        try:
            if place.worn and place.alive:
                self._replaced("worn")
                await place.empty()
            yield place
        finally:
            self._free.put_nowait(place)

    def _replaced(self, reason: str) -> None:
        RESTARTS.labels(self._scorer, reason).inc()
        log.info("process will be replaced", extra={"scorer": self._scorer, "reason": reason})

    async def close(self) -> None:
        """Kill them all and wait for their end."""
        for place in self._places:
            await place.empty()
