"""Payloads between shelves: frames over a connection whose ends have proved that they know the run's secret.

::

    client ──▶ {put: digest, group, size}            server ──▶ {go: true}, or {full: true}
           ──▶ {data: bytes}, … until ``size``              ──▶ {kept: true}
    client ──▶ {get: digest, group, of: replica}     server ──▶ {size}, {data: bytes}, …, or {absent: true}

One request at a time on a connection. Lengths are checked before anything is kept, digests before ``kept``.
"""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from penstock.shared.errors import PeerError
from penstock.shared.peers.frames import Frame, pack, receive_async
from penstock.shared.peers.handshake import Secret, connect

PART_BYTES = 4 << 20
MOST_BYTES = 1 << 36
_FRAME_BYTES = PART_BYTES + 1024
_CONNECT_S = 5.0
STALLED_S = 20.0
"""After which a peer that neither sends nor reads is left."""
_DIGEST = re.compile(r"[0-9a-f]{64}")

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def hear(reader: asyncio.StreamReader) -> Frame:
    """Raises PeerError, TimeoutError."""
    async with asyncio.timeout(STALLED_S):
        return await receive_async(reader, _FRAME_BYTES)


async def say(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Raises OSError, TimeoutError."""
    writer.write(pack(frame))
    async with asyncio.timeout(STALLED_S):
        await writer.drain()


def field(frame: Frame, name: str, kind: type[Any]) -> Any:
    """Return a field of a frame. Raises PeerError: it is not there, or of another type."""
    if type(value := frame.get(name)) is not kind:
        raise PeerError(f"expected {name} of the peer as {kind.__name__}, found {type(value).__name__}")
    return value


def payload_named(frame: Frame, verb: str) -> tuple[int, str]:
    """Return group and digest of a request. Raises PeerError."""
    group, digest = field(frame, "group", int), field(frame, verb, str)
    if not 0 <= group < 1 << 53 or _DIGEST.fullmatch(digest) is None:
        raise PeerError("expected a group and a SHA-256 of the peer, found others")
    return group, digest


def size_of(frame: Frame) -> int:
    """Raises PeerError: no size of a payload."""
    size: int = field(frame, "size", int)
    if not 0 < size <= MOST_BYTES:
        raise PeerError(f"expected a size of 1 to {MOST_BYTES} bytes of the peer, found {size}")
    return size


async def parts(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    """Yield the parts of a payload of ``size`` bytes. Raises PeerError, TimeoutError."""
    left = size
    while left:
        part: bytes = field(await hear(reader), "data", bytes)
        if not 0 < len(part) <= min(left, PART_BYTES):
            raise PeerError(f"expected 1 to {min(left, PART_BYTES)} bytes of the peer, found {len(part)}")
        left -= len(part)
        yield part


async def send(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Raises OSError, TimeoutError."""
    for start in range(0, len(payload), PART_BYTES):
        await say(writer, {"data": payload[start : start + PART_BYTES]})


@contextlib.asynccontextmanager
async def connected(address: str, secret: Secret) -> AsyncIterator[Streams]:
    """Yield a connection to the shelf at ``address``. Raises PeerError, OSError, TimeoutError."""
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await connect(address, secret())
    try:
        yield reader, writer
    finally:
        writer.close()


async def put(address: str, secret: Secret, group_id: int, digest: str, payload: bytes) -> bool:
    """Have the shelf at ``address`` keep a copy; False: it has no room. Raises PeerError, OSError, TimeoutError."""
    async with connected(address, secret) as (reader, writer):
        await say(writer, {"put": digest, "group": group_id, "size": len(payload)})
        if "full" in await hear(reader):
            return False
        await send(writer, payload)
        return "kept" in await hear(reader)


async def get(address: str, secret: Secret, replica: str, group_id: int, digest: str, size: int) -> bytes | None:
    """Return a payload of ``replica``, checked; None: it has it no more. Raises PeerError, OSError, TimeoutError."""
    async with connected(address, secret) as (reader, writer):
        await say(writer, {"get": digest, "group": group_id, "of": replica})
        answer = await hear(reader)
        if "absent" in answer:
            return None
        if size_of(answer) != size:
            raise PeerError(f"expected a payload of {size} bytes of the peer, found {answer['size']}")
        payload = b"".join([part async for part in parts(reader, size)])
    if await asyncio.to_thread(lambda: hashlib.sha256(payload).hexdigest()) != digest:
        raise PeerError("expected the payload of a digest of the peer, found another")
    return payload
