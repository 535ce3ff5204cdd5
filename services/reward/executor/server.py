"""Serve clients over a socket: frames in, executions out, in order of completion.

Closing a connection kills its programs and sessions.
"""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from penstock.services.reward.executor.executor import Executor
from penstock.services.reward.executor.session import Session
from penstock.shared.errors import PeerError, SettingsError
from penstock.shared.executor import protocol
from penstock.shared.executor.protocol import Execution, execution_frame, read_cell, read_job
from penstock.shared.peers import frames
from penstock.shared.peers.handshake import Newcomers, admit_async
from penstock.shared.peers.keep_alive import keep_alive

log = logging.getLogger(__name__)

_STRANGERS = 64
"""Maximum unauthenticated connections; one more drops the oldest."""
_PROVE_WITHIN_S = 10.0


@contextlib.asynccontextmanager
async def serve(executor: Executor, address: str, max_waiting: int, secret: bytes = b"") -> AsyncIterator[str]:
    """Serve at ``address`` (``unix:/path`` or ``host:port``, port 0: any) while the body runs; yield the actual
    address.

    Args:
        secret: may be empty for Unix sockets and loopback.

    Raises:
        SettingsError: the address is taken, or is public without a secret.
    """
    if not secret and not _is_local(address):
        raise SettingsError(
            f"other machines can reach the executor at {address}, which needs reward.executor.secret_file: set it "
            f"here and for "
            "the reward service, or change reward.executor.address"
        )
    connections: set[asyncio.Task[None]] = set()
    strangers = Newcomers(_STRANGERS)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        strangers.enter(task, task.cancel)
        try:
            if (connection := writer.get_extra_info("socket")).family != socket.AF_UNIX:
                keep_alive(connection)
            if secret:
                async with asyncio.timeout(_PROVE_WITHIN_S):
                    await admit_async(reader, writer, secret)
            strangers.leave(task)
            await _Connection(executor, reader, writer, max_waiting).run()
        except asyncio.CancelledError:  # the server closes; asyncio's streams report a cancelled connection as an error
            log.debug("a connection was ended")
        except (PeerError, OSError, TimeoutError) as error:
            log.warning(
                "refused a client that does not know the secret of reward.executor.secret_file",
                extra={"reason": str(error)},
            )
        finally:
            strangers.leave(task)
            connections.discard(task)
            writer.close()

    server, bound_address = await _listen(accept, address)
    try:
        yield bound_address
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        _remove_socket(address)


async def _listen(accept: "asyncio.streams._ClientConnectedCallback", address: str) -> tuple[asyncio.Server, str]:
    try:
        if address.startswith("unix:"):
            _remove_socket(address)
            mask = os.umask(0o177)  # for this user only
            try:
                return await asyncio.start_unix_server(accept, address.removeprefix("unix:")), address
            finally:
                os.umask(mask)
        host, _, port = address.rpartition(":")
        server = await asyncio.start_server(accept, host.strip("[]"), int(port))
        return server, f"{host}:{server.sockets[0].getsockname()[1]}"
    except OSError as error:
        raise SettingsError(
            f"could not listen at {address}: {error.strerror or error}: change reward.executor.address"
        ) from error


def _is_local(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return address.startswith("unix:") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _remove_socket(address: str) -> None:
    if address.startswith("unix:"):
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)


class _Connection:
    def __init__(
        self, executor: Executor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_waiting: int
    ) -> None:
        self._executor = executor
        self._reader = reader
        self._writer = writer
        self._room = asyncio.Semaphore(max_waiting)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._sessions: dict[int, Session] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._beat())
                try:
                    while True:
                        await self._hear(await frames.receive_async(self._reader), tasks)
                finally:
                    for task in (beating, *self._running.values()):
                        task.cancel()
        except* (PeerError, OSError) as errors:
            log.debug("a client left", extra={"reason": str(errors.exceptions[0])})
        finally:
            await asyncio.gather(*(session.close() for session in self._sessions.values()))

    async def _hear(self, frame: frames.Frame, tasks: asyncio.TaskGroup) -> None:
        number = frame.get("id")
        if not isinstance(number, int):
            raise PeerError("expected a number as id, found none")
        if frame.get("verb") == "cancel":
            if number in self._running:
                self._running[number].cancel()
            return
        if frame.get("verb") == "leave":
            tasks.create_task(self._leave(number))
            return
        if frame.get("verb") == "cell":
            cell = read_cell(frame)
            session = self._sessions.setdefault(cell.session, self._executor.session())
            work: Callable[[], Awaitable[Execution]] = functools.partial(self._executor.run_cell, session, cell)
        else:
            work = functools.partial(self._executor.run, read_job(frame))
        await self._room.acquire()
        task = self._running[number] = tasks.create_task(self._answer(number, work))
        task.add_done_callback(lambda _: self._forget(number))

    async def _leave(self, number: int) -> None:
        if number in self._sessions:
            await self._sessions[number].close()  # if this is cancelled, it is closed with the connection
            self._sessions.pop(number, None)

    async def _beat(self) -> None:
        while True:
            self._writer.write(frames.pack({"beat": True}))
            await self._writer.drain()
            await asyncio.sleep(protocol.BEAT_S)

    def _forget(self, number: int) -> None:
        self._running.pop(number, None)
        self._room.release()

    async def _answer(self, number: int, work: Callable[[], Awaitable[Execution]]) -> None:
        execution = await work()
        self._writer.write(frames.pack(execution_frame(number, execution)))
        await self._writer.drain()
