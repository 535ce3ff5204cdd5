"""A TCP proxy that breaks connections on purpose.

::

    client ──▶ proxy ──▶ server      cut()            every connection is reset, now
                                     cut_replies()    the next reply on each is passed on in part, then reset
                                     cut_reply_to(x)  the same of the reply to the next request that holds x
                                     silence()        half-open: connections stay, nothing passes; ``end_silence`` resets them
                                     delay_s          every chunk waits so long

New connections work except during silence. The seed decides which part of a reply passes.
"""

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter

_CHUNK_BYTES = 65_536


class FaultProxy:
    def __init__(self, host: str, port: int, seed: int = 0) -> None:
        self._target = (host, port)
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._torn: set[asyncio.StreamWriter] = set()
        self._unanswered: bytes | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self.delay_s = 0.0
        self.done: Counter[str] = Counter()
        """Number of harmed connections by kind."""

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._passing.set()
        self.cut()

    def cut(self) -> int:
        writers = list(self._writers)
        for writer in writers:
            _reset(writer)
        self.done["cut"] += len(writers)
        return len(writers)

    def cut_replies(self) -> None:
        """On each connection, forward part of the next reply, then reset it."""
        self._torn = set(self._writers)

    def cut_reply_to(self, words: bytes) -> None:
        """Let the server execute the next request that contains ``words``, and lose its reply."""
        self._unanswered = words

    def silence(self) -> None:
        self._passing.clear()

    def end_silence(self) -> None:
        self.cut()
        self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, upstream}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, upstream, writer))
                tasks.create_task(self._pass(upstream_reader, writer, upstream, replies=True))
        finally:
            self._writers -= {writer, upstream}
            for side in (writer, upstream):
                side.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        replies: bool = False,
    ) -> None:
        torn = False
        with contextlib.suppress(OSError):
            while not torn and (data := await reader.read(_CHUNK_BYTES)):
                await self._passing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not replies and self._unanswered is not None and self._unanswered in data:
                    self._unanswered = None
                    self._torn.add(other)
                torn = replies and writer in self._torn
                writer.write(data[: self._random.randrange(len(data))] if torn else data)
                await writer.drain()
        if torn:
            self._torn.discard(writer)
            self.done["torn"] += 1
        for side in (writer, other):
            _reset(side) if torn else side.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, like a network that lost a connection."""
    peer = writer.get_extra_info("socket")
    if peer is not None:
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
