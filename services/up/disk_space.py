"""Report when a run's disk is full, and when it recovers."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from shared.files.durable import LEAST_BYTES

_LOOK_EVERY_S = 1.0


class Room:
    def __init__(self, folder: Path, tell: Callable[[str], None], free_bytes: Callable[[Path], int]) -> None:
        self._folder = folder
        self._tell = tell
        self._free_bytes = free_bytes
        self._full = False

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self) -> None:
        free_bytes = self._free_bytes(self._folder)
        full = free_bytes < LEAST_BYTES * (2 if self._full else 1)
        if full and not self._full:
            self._tell(
                f"no disk space: {free_bytes / 2**20:.1f} MiB are free on the disk of {self._folder}. The run waits; "
                f"free disk space "
                "there (or move run.folder), and it continues automatically"
            )
        if self._full and not full:
            self._tell(f"disk space again: {free_bytes / 2**20:.0f} MiB are free on the disk of {self._folder}")
        self._full = full
