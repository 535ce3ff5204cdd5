"""Client of an executor: one connection, many concurrent programs; lost connections are retried with backoff.

An executor that stops, so that no beat of it arrives, counts as lost. Those of earlier versions have none.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable

from penstock.shared.backoff import Backoff
from penstock.shared.errors import PeerError, TemporaryError
from penstock.shared.executor.protocol import (
    Cell,
    Execution,
    Job,
    Limits,
    Outcome,
    cell_frame,
    job_frame,
    read_execution,
)
from penstock.shared.files.secret_file import read_secret
from penstock.shared.peers import frames
from penstock.shared.peers.handshake import introduce
from penstock.shared.peers.keep_alive import keep_alive
from penstock.shared.settings.rewards.reward import ExecutorSettings

CONNECT_WITHIN_S = 5.0
SILENT_S = 60.0
"""Without a frame, after which an executor that beats is lost."""
_IN_FLIGHT = 64
"""Programs at a time; others wait here."""
_BACKOFF = Backoff(0.2, longest_s=5.0)
_CLOSED = PeerError("the connection was closed")


class ExecutorClient:
    """One executor.

    Args:
        address: ``unix:/path`` or ``host:port``.
        secret: empty for none.
    """

    def __init__(self, address: str, secret: bytes = b"") -> None:
        self.address = address
        self._secret = secret
        self._places = asyncio.Semaphore(_IN_FLIGHT)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Execution]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._failures = 0
        self._not_before_s = 0.0
        self._beats = False
        """Whether the first frame of the newest connection was one."""

    async def run(self, job: Job) -> Execution:
        """Raises TemporaryError: the executor cannot be reached, or was lost."""
        async with self._places:
            writer = await self._connected()
            return await self._ask(writer, lambda number: job_frame(number, job))

    @contextlib.asynccontextmanager
    async def session(self, profile: str, limits: Limits) -> AsyncIterator["ExecutorSession"]:
        """Yield a session, which ends with the body."""
        session = ExecutorSession(self, next(self._numbers), profile, limits)
        try:
            yield session
        finally:
            session.leave()

    async def _ask(self, writer: asyncio.StreamWriter, frame: Callable[[int], frames.Frame]) -> Execution:
        number = next(self._numbers)
        answer: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            writer.write(frames.pack(frame(number)))
            await writer.drain()
            return await answer
        except OSError as error:
            raise self._gone(error) from error
        except asyncio.CancelledError:
            if not writer.is_closing():
                writer.write(frames.pack({"verb": "cancel", "id": number}))
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)  # it may not have started
        await self._drop(_CLOSED)

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                self._writer = await self._connect()
            return self._writer

    async def _connect(self) -> asyncio.StreamWriter:
        await asyncio.sleep(self._not_before_s - time.monotonic())
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                reader, writer = await self._open()
        except (OSError, TimeoutError, PeerError) as error:
            self._failures += 1
            self._not_before_s = time.monotonic() + _BACKOFF.wait_s(self._failures)
            raise self._gone(error) from error
        self._failures = 0
        self._reading = asyncio.create_task(self._read(reader))
        return writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason: Exception = _CLOSED
        try:
            for number in itertools.count():
                async with asyncio.timeout(SILENT_S if self._beats else None):
                    frame = await frames.receive_async(reader)
                if not number:
                    self._beats = "beat" in frame
                answer = self._waiting.get(frame.get("id", -1))
                if answer is not None and not answer.done():
                    answer.set_result(read_execution(frame))
        except TimeoutError:
            reason = PeerError(f"nothing was received for {SILENT_S:g} s")
        except (OSError, PeerError) as error:
            reason = error
        finally:
            await self._drop(reason)

    async def _drop(self, reason: Exception) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._gone(reason))
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _gone(self, error: Exception) -> TemporaryError:
        return TemporaryError(
            f"could not reach the code executor at {self.address}: {error or type(error).__name__}: "
            "start it, or change reward.executor.address or secret_file"
        )

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.address.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(self.address.removeprefix("unix:"))
        else:
            host, _, port = self.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            keep_alive(writer.get_extra_info("socket"))
        try:
            if self._secret:
                await introduce(reader, writer, self._secret)
        except BaseException:
            writer.close()
            raise
        return reader, writer


class ExecutorSession:
    """A session of a client's; one cell at a time."""

    def __init__(self, client: ExecutorClient, number: int, profile: str, limits: Limits) -> None:
        self._client, self._number, self._profile, self._limits = client, number, profile, limits
        self._writer: asyncio.StreamWriter | None = None
        """The connection that it is of, since its first cell."""

    async def run(self, code: str) -> Execution:
        """Run code after the earlier cells. Raises TemporaryError: the executor cannot be reached, or has lost the session."""
        writer = await self._client._connected()
        self._writer = self._writer or writer
        if writer is not self._writer:
            raise TemporaryError(f"the code executor at {self._client.address} was lost, and the session with it")
        cell = Cell(self._number, code, self._profile, self._limits)
        execution = await self._client._ask(writer, lambda number: cell_frame(number, cell))
        if execution.outcome is Outcome.SANDBOX_ERROR:
            raise TemporaryError(f"the executor is at fault: {execution.detail}")
        return execution

    def leave(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frames.pack({"verb": "leave", "id": self._number}))


def read_executor_secret(settings: ExecutorSettings) -> bytes:
    return b"" if settings.secret_file is None else read_secret(settings.secret_file, "reward.executor.secret_file")
