"""Frames: messages between two processes beside the bus.

A frame is a four-byte length (big endian) and a MessagePack map of at most 64 MiB, or 512 MiB where it has a sample;
anything else closes the connection.
"""

import asyncio
import select
import socket
import struct
import time
from typing import Any

import msgpack

from penstock.shared.errors import PeerError

MAX_BYTES = 64 << 20
SAMPLE_BYTES = 512 << 20
"""Maximum with a sample, as of a value of Redis, in which it travels on."""
PART_BYTES = SAMPLE_BYTES * 3 // 4
"""Maximum of a sample's array that has smaller ones beside it."""
PROBE_BYTES = 4 << 20
"""Maximum of one probe of a link."""
_LENGTH = struct.Struct(">I")
_CHUNK_BYTES = 1 << 20
Frame = dict[str, Any]


def pack(frame: Frame) -> bytes:
    body: bytes = msgpack.packb(frame)
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, frame: Frame, deadline_s: float) -> None:
    try:
        connection.settimeout(deadline_s)
        connection.sendall(pack(frame))
    except OSError as error:
        raise PeerError(f"could not write to the peer: {error}") from error


def readable(connection: socket.socket, timeout_s: float | None = 0.0) -> bool:
    """Return whether the peer sent or left within ``timeout_s`` (None: no limit)."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))


def receive(connection: socket.socket, deadline_s: float | None, largest: int = MAX_BYTES) -> Frame:
    """``deadline_s`` None: no limit."""
    ends_at_s = None if deadline_s is None else time.monotonic() + deadline_s
    return _unpack(_read(connection, _length(_read(connection, _LENGTH.size, ends_at_s), largest), ends_at_s))


async def receive_async(reader: asyncio.StreamReader, largest: int = MAX_BYTES) -> Frame:
    """As :func:`receive`, without a deadline."""
    try:
        size = _length(await reader.readexactly(_LENGTH.size), largest)
        return _unpack(await reader.readexactly(size))
    except asyncio.IncompleteReadError as error:
        raise PeerError("the peer closed the connection") from error


def _length(prefix: bytes, largest: int) -> int:
    size: int = _LENGTH.unpack(prefix)[0]
    if size > largest:
        raise PeerError(
            f"expected a frame of at most {largest} bytes, found {size}: the peer does not speak Penstock's protocol"
        )
    return size


def _read(connection: socket.socket, size: int, ends_at_s: float | None) -> bytes:
    received = bytearray()
    while len(received) < size:
        try:
            connection.settimeout(None if ends_at_s is None else max(ends_at_s - time.monotonic(), 0.001))
            part = connection.recv(min(size - len(received), _CHUNK_BYTES))
        except TimeoutError as error:
            raise PeerError(f"expected {size} bytes of the peer, found {len(received)} at the deadline") from error
        except OSError as error:
            raise PeerError(f"could not read {size} bytes from the peer: {error}") from error
        if not part:
            raise PeerError(f"the peer closed the connection before {size} bytes arrived")
        received += part
    return bytes(received)


def _unpack(body: bytes) -> Frame:
    try:
        frame = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise PeerError(f"expected MessagePack of the peer, found other bytes: {error}") from error
    if not isinstance(frame, dict) or not all(isinstance(key, str) for key in frame):
        raise PeerError("expected a map of names of the peer, found other content")
    return frame
