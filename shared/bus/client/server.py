"""Run commands and scripts on a bus server that may be away.

Calls wait with capped exponential backoff; scripts may be repeated.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from penstock.shared.backoff import Backoff
from penstock.shared.bus.client import connection
from penstock.shared.bus.client.lua import Argument, Script
from penstock.shared.errors import BusFull, BusUnavailable, PermanentError

log = logging.getLogger(__name__)

R = TypeVar("R")

_UNAVAILABLE = (
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
    OSError,
)
_CLOSED = "the handler is closed"
"""uvloop's sentence for a write to a connection that has just been closed, which redis-py takes for no lost one."""
_NO_WRITES = {
    "MISCONF": "the server cannot write its data to disk",
    "NOREPLICAS": "too few replicas of the server are in step (min-replicas-to-write)",
}
_BACKOFF = Backoff(0.05, longest_s=2.0)
_LONGEST_VALUE = 512 * 1024**2
"""The server's ``proto-max-bulk-len``: it closes the connection of a client that sends more."""
_MOST_TOGETHER = 64
"""Commands of a pipeline, whose answers come together."""
_Asked: TypeAlias = "list[tuple[Sequence[Argument], asyncio.Future[Any]]]"


class Together:
    """Sends the commands of one iteration of the event loop in one pipeline: those of many samples that end together.

    None of them may block. Each gets its own answer or error; a lost connection is an error of all.
    """

    def __init__(self, client: connection.Client) -> None:
        self._client = client
        self._open: _Asked | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def execute(self, *words: Argument) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if self._open is None or len(self._open) == _MOST_TOGETHER:
            asked = self._open = []
            task = loop.create_task(self._send(asked))
            self._sending.add(task)
            task.add_done_callback(lambda task: self._sent(task, asked))
        self._open.append((words, answer))
        return await answer

    async def _send(self, asked: _Asked) -> None:
        self._close(asked)
        try:
            answers = await self._answers([words for words, _ in asked])
        except Exception as error:  # noqa: BLE001 (whoever asked decides what to do about it)
            answers = [error] * len(asked)
        for (_, answer), value in zip(asked, answers, strict=True):
            if answer.done():  # cancelled
                continue
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)

    async def _answers(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        if len(commands) == 1:
            return [await self._client.execute_command(*commands[0])]
        pipeline = self._client.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        return await pipeline.execute(raise_on_error=False)

    def _close(self, asked: _Asked) -> None:
        if self._open is asked:
            self._open = None

    def _sent(self, task: "asyncio.Task[None]", asked: _Asked) -> None:
        """Also of a task that was cancelled, perhaps before it began."""
        self._sending.discard(task)
        self._close(asked)
        for _, answer in asked:
            answer.cancel()


class Server:
    """A server that may be away. ``client``: from :func:`connection.open_client`. ``wait_s``: timeout of a call; None:
    forever.
    """

    def __init__(self, client: connection.Client, *, wait_s: float | None = None) -> None:
        self._client = client
        self._together = Together(client)
        self.reconnects = 0
        self.available = True
        self._wait_s = wait_s

    def wait_for_ever(self) -> None:
        self._wait_s = None

    def wait_no_more(self) -> None:
        """Have calls that get no answer fail, also those that wait for one."""
        self._wait_s = 0.0

    async def close(self) -> None:
        await connection.close_client(self._client)

    async def call(self, command: Callable[[], Awaitable[R]]) -> R:
        """Run ``command``, repeatedly while the server is unreachable or takes no writes. Raises BusUnavailable:
        no answer for ``wait_s``.
        """
        started_s, failures = time.monotonic(), 0
        while True:
            try:
                result = await _answered(command)
            except (*_UNAVAILABLE, BusUnavailable) as error:
                waited_s = time.monotonic() - started_s
                if self._wait_s is not None and waited_s > self._wait_s:
                    raise BusUnavailable(
                        f"the Redis or Valkey server did not answer within {self._wait_s:.0f} s: {error}"
                    ) from error
                self._note_lost(error)
                failures += 1
                await asyncio.sleep(_BACKOFF.jittered_s(failures))
            else:
                self._note_back()
                return result

    def _note_lost(self, error: BaseException) -> None:
        if self.available:
            self.available = False
            log.warning("bus unavailable, waiting", extra={"error": str(error)})

    def _note_back(self) -> None:
        if not self.available:
            self.available = True
            self.reconnects += 1
            log.info("bus available again", extra={"reconnects": self.reconnects})

    async def evaluate(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run a script atomically. Raises PermanentError: an argument is longer than the server takes."""
        check_lengths(arguments)
        words = (len(keys), *keys, *arguments)
        try:
            return await self.call(lambda: self._evaluate(script, words))
        except OutOfMemoryError as error:
            raise BusFull(f"the bus is out of memory ({error}): raise its maxmemory") from error

    async def _evaluate(self, script: Script, words: Sequence[Argument]) -> Any:
        try:
            return await self._together.execute("EVALSHA", script.digest, *words)
        except NoScriptError:  # a new or restarted server
            return await self._together.execute("EVAL", script.text, *words)


def check_lengths(words: Sequence[Argument]) -> None:
    """Raise PermanentError if the server would close the connection: it would look lost, each time."""
    longest = max((len(word) for word in words if isinstance(word, (bytes, str))), default=0)
    if longest > _LONGEST_VALUE:
        raise PermanentError(
            f"expected messages of at most {_LONGEST_VALUE >> 20} MiB, the longest value of Redis, found {longest >> 20} "
            "MiB: lower sampling.group_size, sampling.max_new_tokens or sampling.top_k"
        )


async def _answered(command: Callable[[], Awaitable[R]]) -> R:
    """Return the answer or raise the error; a cancellation meanwhile is raised whichever of them came.

    Before Python 3.12, redis-py's ``asyncio.wait_for`` may swallow one just as the command is sent.
    """
    cancels = _cancels()
    try:
        return await command()
    except ResponseError as error:
        why = next((why for code, why in _NO_WRITES.items() if code in str(error)), None)
        if why is None:
            raise
        raise BusUnavailable(f"{why}, so it takes no writes: {error}") from error
    except RuntimeError as error:
        if _CLOSED not in str(error):
            raise
        raise BusUnavailable(f"the server closed the connection: {error}") from error
    finally:
        if _cancels() > cancels:
            raise asyncio.CancelledError


def _cancels() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
