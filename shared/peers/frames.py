"""Frames: how two processes of Penstock talk over one connection beside the bus. No torch.

A frame is four bytes of length (big endian) and a MessagePack map. Longer than 64 MiB, or no map: the peer is none of ours, and
the connection is closed. What the maps say is the business of who uses them: ``shared/weights/source/session.py`` (a puller and its source),
``services/rollout/engines/vllm/worker_channel.py`` (a replica and the workers of its engine),
``services/reward/executor/protocol.py`` (programs to run and what became of them).
"""

import asyncio
import select
import socket
import struct
import time
from typing import Any

import msgpack

from shared.errors import PeerError

MAX_BYTES = 64 << 20
"""Longest frame that is read."""
_LENGTH = struct.Struct(">I")
_CHUNK_BYTES = 1 << 20
Frame = dict[str, Any]


def pack(frame: Frame) -> bytes:
    """Return the bytes of a frame, length first."""
    body: bytes = msgpack.packb(frame)
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, frame: Frame, deadline_s: float) -> None:
    """Send a frame.

    Raises:
        PeerError: the peer is gone or did not read within ``deadline_s``.
    """
    try:
        connection.settimeout(deadline_s)
        connection.sendall(pack(frame))
    except OSError as error:
        raise PeerError(f"expected to tell the peer, found: {error}") from error


def readable(connection: socket.socket, timeout_s: float | None = 0.0) -> bool:
    """Return whether the peer sent something, or left, within ``timeout_s`` (None: wait for ever)."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))


def receive(connection: socket.socket, deadline_s: float | None, largest: int = MAX_BYTES) -> Frame:
    """Return the next frame, of at most ``largest`` bytes; all of it must come within ``deadline_s`` (None: wait for ever).

    Raises:
        PeerError: it did not, the peer left, or what it sent is no frame.
    """
    ends_at_s = None if deadline_s is None else time.monotonic() + deadline_s
    return _unpack(_read(connection, _length(_read(connection, _LENGTH.size, ends_at_s), largest), ends_at_s))


async def receive_async(reader: asyncio.StreamReader, largest: int = MAX_BYTES) -> Frame:
    """Return the next frame, of at most ``largest`` bytes; the caller sets the deadline.

    Raises:
        PeerError: the peer left, or what it sent is no frame.
    """
    try:
        size = _length(await reader.readexactly(_LENGTH.size), largest)
        return _unpack(await reader.readexactly(size))
    except asyncio.IncompleteReadError as error:
        raise PeerError("expected a frame of the peer, found that it closed the connection") from error


def _length(prefix: bytes, largest: int) -> int:
    size: int = _LENGTH.unpack(prefix)[0]
    if size > largest:
        raise PeerError(f"expected a frame of at most {largest} bytes, found {size}: the peer speaks no Penstock")
    return size


def _read(connection: socket.socket, size: int, ends_at_s: float | None) -> bytes:
    found = bytearray()
    while len(found) < size:
        try:
            connection.settimeout(None if ends_at_s is None else max(ends_at_s - time.monotonic(), 0.001))
            part = connection.recv(min(size - len(found), _CHUNK_BYTES))
        except TimeoutError as error:
            raise PeerError(f"expected {size} bytes of the peer, found {len(found)} at the deadline") from error
        except OSError as error:
            raise PeerError(f"expected {size} bytes of the peer, found: {error}") from error
        if not part:
            raise PeerError(f"expected {size} bytes of the peer, found that it closed the connection")
        found += part
    return bytes(found)


def _unpack(body: bytes) -> Frame:
    try:
        frame = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise PeerError(f"expected MessagePack of the peer, found other bytes: {error}") from error
    if not isinstance(frame, dict) or not all(isinstance(key, str) for key in frame):
        raise PeerError("expected a map of names of the peer, found other content")
    return frame
