"""Report when a run's disk is full, and when it recovers; and at the start, whether checkpoints will fit."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from penstock.services.plan.certain import checkpoint_bytes, visible_gpus
from penstock.shared.files.checkpoint_folder import CHECKPOINTS
from penstock.shared.files.durable import LEAST_BYTES
from penstock.shared.settings import Settings

_LOOK_EVERY_S = 1.0


def checkpoint_notice(settings: Settings, folder: Path, free_bytes: Callable[[Path], int]) -> str:
    """Return the notice that the disk of ``folder`` has no room for the run's checkpoints, or "".

    ``trainer.keep_last`` of them stay while the next one is written. No notice on CPUs, of adapters, and of models whose
    sizes config.json does not give exactly.
    """
    nbytes, kept = checkpoint_bytes(settings) if visible_gpus() else 0.0, settings.trainer.keep_last
    free, there = free_bytes(folder), len(list((folder / CHECKPOINTS).glob("step-*")))
    if not nbytes or free >= (kept + 1 - min(there, kept)) * nbytes:
        return ""
    more = (
        "none can be written" if free < nbytes else f"and trainer.keep_last = {kept} stay while the next one is written"
    )
    smaller = ', or choose trainer.optimizer = "adamw_8bit"' if settings.trainer.optimizer == "adamw" else ""
    return (
        f"a checkpoint needs {nbytes / 2**30:.1f} GiB, {more}: {free / 2**30:.1f} GiB are free on the disk of {folder}. Free space "
        f"there, or move run.folder{smaller}; without a checkpoint a resumed run replays all steps"
    )


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
                "free disk space there, and it continues automatically"
            )
        if self._full and not full:
            self._tell(f"disk space again: {free_bytes / 2**20:.0f} MiB are free on the disk of {self._folder}")
        self._full = full
