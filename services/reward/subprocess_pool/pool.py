"""A pool of processes that answer one question at a time.

::

    ask(question) ──▶ waits for a process, fairly ──▶ its answer
                          ├── late                              killed ──▶ Overdue
                          ├── ``computes``, CPU time exceeded          ──▶ Overdue; a fork takes over
                          │     └── starved for ten times that  killed ──▶ TemporaryError
                          ├── died once                         retried in a fresh one
                          ├── died twice                        ──▶ Crashed: the question's fault
                          ├── cannot be started                 ──▶ TemporaryError
                          └── the caller was cancelled          killed

The protocol is JSON lines (:mod:`child`). The deadline starts when the question is sent; for pure computation it is CPU
time, so that a busy host causes no failures. Killing a process kills its descendants.

Questions of one :class:`Share`, as a group's, wait for one another: a free process takes one of the share that has used
the least time (start-time fair queueing), so that questions that run into their deadline delay those of others by one.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from prometheus_client import Counter

from penstock.shared.bus.messages import Json
from penstock.shared.errors import PenstockError, TemporaryError
from penstock.shared.process.children import kill_group, reap
from penstock.shared.process.parent import FOR_PYTHON

log = logging.getLogger(__name__)

RESTARTS = Counter(
    "penstock_reward_process_restarts_total",
    "Killable processes that were replaced, by why: overdue, died, cancelled, or worn (recycled after many questions).",
    ["scorer", "reason"],
)
START_WITHIN_S = 60.0
WORN_AFTER_QUESTIONS = 5_000
"""Processes are recycled, because computer algebra leaks memory."""
PATIENCE = 10
"""A process that has not used its CPU time within this multiple of it is starved."""


class Overdue(PenstockError):
    """The process was killed because its answer was late."""


class Crashed(PenstockError):
    """Two processes died on one question."""


class NotReady(TemporaryError):
    """The process reported why it cannot start."""


@dataclasses.dataclass(eq=False, slots=True)
class Share:
    """The questions of one asker; ``used_s``: their time in processes, from where others were when it came."""

    used_s: float = 0.0


class _Place:
    """Slot for one process; empty until needed and after a kill."""

    def __init__(self, command: Sequence[str], environment: Sequence[str]) -> None:
        self._command = command
        self._environment = (*FOR_PYTHON, *environment)
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False  # its exit code comes later, and it may have answered the question before
        self._questions = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._is_killed and self._process.returncode is None

    @property
    def worn(self) -> bool:
        return self._questions >= WORN_AFTER_QUESTIONS

    async def fill(self) -> None:
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
            raise TemporaryError(f"a process was not ready within {START_WITHIN_S:.0f} s: {error!r}") from error
        except BaseException:
            self.kill()
            raise
        if answer.get("ready") is not True:
            await self.empty()
            raise NotReady(str(answer.get("error")))
        self._questions = 0

    async def put(self, question: bytes) -> Mapping[str, Json]:
        """Ask the process. Raises EOFError if it died."""
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
        except ValueError as error:  # nothing, a partial line, or not JSON
            raise EOFError("the process died") from error
        return answer

    def kill(self) -> None:
        if self._process is not None:
            self._is_killed = True
            kill_group(self._process.pid)

    async def empty(self) -> None:
        self.kill()
        process, self._process = self._process, None
        self._is_killed = False
        if process is not None:
            await reap(process)


class Processes:
    """``count`` processes of ``command``, to which this process's id is appended; ``environment`` names further
    variables that they see, and ``computes`` says that questions are pure computation, as in :func:`child.serve`.
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
        self._free = list(self._places)
        self._waiting: dict[asyncio.Future[_Place], Share] = {}
        """In the order of arrival."""
        self._least_s = 0.0
        self._scorer = scorer
        self.questions = 0

    @property
    def alive(self) -> int:
        return sum(place.alive for place in self._places)

    async def warm(self) -> None:
        for outcome in await asyncio.gather(*(place.fill() for place in self._places), return_exceptions=True):
            if isinstance(outcome, TemporaryError) and not isinstance(outcome, NotReady):
                log.warning("process cannot be started", extra={"scorer": self._scorer, "error": str(outcome)})
            elif outcome is not None:
                raise outcome

    async def ask(self, question: dict[str, Json], timeout_s: float, share: Share | None = None) -> Mapping[str, Json]:
        """Return the answer of a free process; ``share``: of the question's asker, if it has others.

        Raises:
            Overdue: no answer within ``timeout_s`` (CPU time if ``computes``).
            Crashed: two processes died on it.
            TemporaryError: no process can be started, or the host starved it.
        """
        within_s = PATIENCE * timeout_s if self._computes else timeout_s
        line = json.dumps(question | {"cpu_s": timeout_s} if self._computes else question).encode() + b"\n"
        async with self._place(share or Share()) as place:
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
            raise Crashed("two processes died while they computed it")

    def _late(self, timeout_s: float) -> PenstockError:
        if not self._computes:
            return Overdue(f"no answer within {timeout_s:g} s")
        return TemporaryError(f"the process made no progress for {PATIENCE * timeout_s:g} s")

    @contextlib.asynccontextmanager
    async def _place(self, share: Share) -> AsyncIterator[_Place]:
        share.used_s = max(share.used_s, self._least_s)
        granted: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._waiting[granted] = share
        self._grant()
        started_s = time.monotonic()
        try:
            place = await granted
            started_s = time.monotonic()
            if place.worn and place.alive:
                self._replaced("worn")
                await place.empty()
            await place.fill()  # which another's question has made necessary
            started_s = time.monotonic()
            yield place
        finally:
            self._waiting.pop(granted, None)
            if not granted.cancelled():
                share.used_s += time.monotonic() - started_s
                self._free.append(granted.result())
                self._grant()

    def _grant(self) -> None:
        while self._free and (waiting := [each for each in self._waiting if not each.done()]):
            first = min(waiting, key=lambda each: self._waiting[each].used_s)
            self._least_s = self._waiting.pop(first).used_s
            first.set_result(self._free.pop())

    def _replaced(self, reason: str) -> None:
        RESTARTS.labels(self._scorer, reason).inc()
        log.info("process will be replaced", extra={"scorer": self._scorer, "reason": reason})

    async def close(self) -> None:
        for place in self._places:
            await place.empty()
