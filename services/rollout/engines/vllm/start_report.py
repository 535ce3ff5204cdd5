"""Activities of vLLM's start: replica and workers append them to a file, which the replica reads.

They begin before the worker's channel is open. Workers on other hosts report nothing.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from penstock.shared.files import temporary

FILE = "PENSTOCK_ENGINE_START"
_ACTIVITIES = {
    "init_device": "opening the device",
    "load_model": "building the engine's model",
    "determine_available_memory": "compiling and measuring memory",
    "initialize_from_config": "allocating the key-value cache",
    "compile_or_warm_up_model": "warming up, capturing graphs",
}
"""By the worker's method."""
_LOOK_EVERY_S = 0.5


def note(activity: str) -> None:
    """Report that ``activity`` begins, if the replica asks for it."""
    if FILE in os.environ:
        with contextlib.suppress(OSError), Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            file.write(f"{time.time()} {activity}\n")


def report(worker: Any) -> None:
    """Make ``worker`` report its start, if the replica asks for it."""
    if FILE in os.environ:
        for method, activity in _ACTIVITIES.items():
            if hasattr(worker, method):  # other releases of vLLM
                setattr(worker, method, _reported(activity, getattr(worker, method)))


def _reported(activity: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def reported(*arguments: Any, **named: Any) -> Any:
        note(activity)
        return call(*arguments, **named)

    return reported


@contextlib.asynccontextmanager
async def followed(begin: Callable[[str, float], None]) -> AsyncIterator[None]:
    """Call ``begin`` with each activity, and when it began, of the engines that start in the body."""
    with temporary.made("start") as folder:
        os.environ[FILE] = f"{folder}/activities"
        following = asyncio.create_task(_follow(Path(os.environ[FILE]), begin))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            os.environ.pop(FILE)


async def _follow(file: Path, begin: Callable[[str, float], None]) -> None:
    known = 0
    try:
        while True:
            known = _read(file, known, begin)
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        _read(file, known, begin)


def _read(file: Path, known: int, begin: Callable[[str, float], None]) -> int:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in lines[known:]:
        at_s, _, activity = line.partition(" ")
        begin(activity, float(at_s))
    return len(lines)
