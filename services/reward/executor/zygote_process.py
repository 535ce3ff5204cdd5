"""Supervisor side of a warm interpreter: start it, send it jobs, replace it if worn or dead."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter

from penstock.services.reward.executor.isolation import Isolation
from penstock.services.reward.executor.slots import Usage
from penstock.services.reward.executor.verdict import Ended
from penstock.shared.errors import TemporaryError

log = logging.getLogger(__name__)

RESTARTS = Counter(
    "penstock_executor_zygote_restarts_total",
    "Warm interpreters that were replaced, by why: worn (recycled after many programs), died, or stuck.",
    ["profile", "reason"],
)
START_WITHIN_S = 30.0
_PACKET_BYTES = 1 << 16
_LAST_WORDS_BYTES = 2000


class ZygoteLost(TemporaryError):
    """The warm interpreter died or hangs, through no fault of the program, which no longer runs."""


class ZygoteProcess:
    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Ended]] = {}
        self._asked: dict[int, asyncio.Future[Usage]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.jobs = 0
        self.lost = False

    @classmethod
    async def start(cls, isolation: Isolation, profile: str) -> "ZygoteProcess":
        """Start a zygote and wait until it is warm."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (fork and exec, no waiting)
                isolation.command(profile, theirs.fileno()),
                env=dict(isolation.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd="/",
            )
        ours.setblocking(False)
        zygote = cls(process, ours)
        asyncio.get_running_loop().add_reader(ours, zygote._hear)
        try:
            async with asyncio.timeout(START_WITHIN_S):
                await asyncio.shield(zygote._ready)
        except (TimeoutError, ZygoteLost) as error:
            words = zygote._last_words()
            await zygote.close()
            raise ZygoteLost(words or str(error) or f"not ready within {START_WITHIN_S:g} s") from error
        except BaseException:
            await zygote.close()
            raise
        return zygote

    @property
    def idle(self) -> bool:
        return not self._waiting

    def put(
        self, bounds: Mapping[str, int], core: int, descriptors: Sequence[int]
    ) -> tuple[int, asyncio.Future[Ended]]:
        """Send a job; return its number and the future of its end."""
        number = next(self._numbers)
        message = {"id": number, "bounds": bounds, "core": core}
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))
        except OSError as error:
            self._lose(f"cannot be reached: {error}")
            raise ZygoteLost(f"the warm interpreter cannot be reached: {error}") from error
        self.jobs += 1
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._waiting[number] = ended
        return number, ended

    def tell(self, number: int, verb: str) -> None:
        if number in self._waiting:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({verb: number}).encode())

    async def usage(self, number: int, ended: asyncio.Future[Ended], within_s: float) -> Usage | None:
        """None if the job ended meanwhile, or without an answer ``within_s``."""
        answer = self._asked.get(number)
        if answer is None:
            answer = self._asked[number] = asyncio.get_running_loop().create_future()
            self.tell(number, "ask")
        either: list[asyncio.Future[Any]] = [answer, ended]
        await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None

    async def close(self) -> None:
        self._lose("was closed")
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _hear(self) -> None:
        try:
            packet = self._control.recv(_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not packet:
            self._lose("died")
            return
        self._understand(json.loads(packet))

    def _understand(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready.set_result(None)
            return
        number = message.pop("id")
        answer = self._asked.pop(number, None)
        if "charged_s" in message:
            if answer is not None:
                answer.set_result(Usage(**message))
            return
        ended = self._waiting.pop(number, None)
        if ended is None or ended.done():
            return
        if "error" in message:
            ended.set_exception(ZygoteLost(f"the warm interpreter cannot start a program: {message['error']}"))
        else:
            ended.set_result(Ended(**message))

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = True
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        error = ZygoteLost(f"the warm interpreter {reason}")
        waiting, self._waiting = self._waiting, {}
        for ended in waiting.values():
            _fail(ended, error)
        _fail(self._ready, error)

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        self._process.kill()
        words = self._process.stderr.read(_LAST_WORDS_BYTES).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(words) if line.strip()), "")


def _fail(future: asyncio.Future[Any], error: ZygoteLost) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # mark as retrieved, although there may be no waiter


@dataclasses.dataclass(slots=True)
class Zygotes:
    """The current warm interpreter of one profile.

    A worn one is replaced while it finishes its jobs; a dead one when the next job needs it.
    """

    isolation: Isolation
    profile: str
    recycle_after: int
    _current: ZygoteProcess | None = None
    _old: set[ZygoteProcess] = dataclasses.field(default_factory=set)
    _starting: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        for reason in ("worn", "died", "stuck"):
            RESTARTS.labels(self.profile, reason)  # create the series at 0

    async def take(self) -> ZygoteProcess:
        async with self._starting:
            await self._sweep()
            current = self._current
            if current is None or current.lost or current.jobs >= self.recycle_after:
                self._current = await ZygoteProcess.start(self.isolation, self.profile)
                if current is not None:
                    self._old.add(current)
                    self._count("died" if current.lost else "worn")
            assert self._current is not None
            return self._current

    async def discard(self, zygote: ZygoteProcess) -> None:
        if not zygote.lost:
            self._count("stuck")
        await zygote.close()
        if zygote is self._current:
            self._current = None

    async def close(self) -> None:
        for zygote in (*self._old, self._current):
            if zygote is not None:
                await zygote.close()
        self._old.clear()
        self._current = None

    async def _sweep(self) -> None:
        for zygote in [zygote for zygote in self._old if zygote.idle or zygote.lost]:
            self._old.discard(zygote)
            await zygote.close()

    def _count(self, reason: str) -> None:
        RESTARTS.labels(self.profile, reason).inc()
        log.log(
            logging.INFO if reason == "worn" else logging.WARNING, "warm interpreter replaced", extra={"reason": reason}
        )
