"""The files of one shelf: ``<group>-<SHA-256>``, each a payload. The kernel keeps recent ones in memory.

They outlive the process, so that its next one serves them again. Files in the making begin with a dot.
"""

import contextlib
import hashlib
import itertools
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.shared.files import durable

_NAME = re.compile(r"(\d{1,16})-([0-9a-f]{64})")
_numbers = itertools.count()
_ASIDE_BYTES = 1 << 30
"""Of the disk, for what cannot be carried by the bus: records, logs."""


class ShelfFull(Exception):
    """There is no room for a payload."""


class Store:
    """At most ``most_bytes`` in ``folder``, which is made with the first file; for any thread. Raises OSError."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._coming = 0
        for path in folder.iterdir() if folder.is_dir() else ():
            if _NAME.fullmatch(path.name):
                self._sizes[path.name] = path.stat().st_size
            elif path.name.startswith("."):
                path.unlink(missing_ok=True)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values()) + self._coming

    @property
    def names(self) -> list[tuple[int, str]]:
        """The group and digest of each payload."""
        with self._lock:
            return [(int(group), digest) for group, _, digest in (name.partition("-") for name in self._sizes)]

    def put(self, group_id: int, digest: str, payload: bytes) -> None:
        """Raises ShelfFull."""
        with self.receiving(group_id, digest, len(payload)) as file:
            file.write(payload)

    @contextlib.contextmanager
    def receiving(self, group_id: int, digest: str, size: int) -> Iterator[BinaryIO]:
        """Yield a file that becomes the payload ``digest`` if the block succeeds. Raises ShelfFull."""
        name = f"{group_id}-{digest}"
        if durable.free_bytes(durable.existing(self._folder)) < size + _ASIDE_BYTES:
            raise ShelfFull
        with self._lock:
            if sum(self._sizes.values()) + self._coming + size > self._most_bytes:
                raise ShelfFull
            self._coming += size
        part = self._folder / f".{name}.{os.getpid()}.{next(_numbers)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                yield file
            part.rename(self._folder / name)
            with self._lock:
                self._sizes[name] = size
        except OSError as error:
            if error.errno in durable.NO_ROOM:
                raise ShelfFull from error
            raise
        finally:
            part.unlink(missing_ok=True)
            with self._lock:
                self._coming -= size

    def read(self, group_id: int, digest: str) -> bytes | None:
        """Return a payload, checked; None: it is not here, or cannot be read."""
        try:
            payload = (self._folder / f"{group_id}-{digest}").read_bytes()
        except OSError:
            return None
        if hashlib.sha256(payload).hexdigest() != digest:
            self.drop([(group_id, digest)])
            return None
        return payload

    def drop(self, payloads: Iterable[tuple[int, str]]) -> None:
        """Delete payloads, by group and digest; those that are not here are ignored."""
        for group_id, digest in payloads:
            name = f"{group_id}-{digest}"
            with self._lock:
                self._sizes.pop(name, None)
            (self._folder / name).unlink(missing_ok=True)
