"""The reward service, printing every thread's stack when its event loop is late (``benchmarks.reward.hostile_rewards --stacks``).

A thread of the C library prints, so that a stall in which the interpreter's lock is held shows, too.
"""

import asyncio
import faulthandler
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.services.reward.service import run
from penstock.shared.process.service import leave, main
from penstock.shared.settings import Settings

LATE_S = 0.06
_PERIOD_S = 0.01
T = TypeVar("T")


def with_stacks(serve: Callable[[Settings, str], Awaitable[T]]) -> Callable[[Settings, str], Awaitable[T]]:
    """Return ``serve`` with a heartbeat beside it."""

    async def watched(settings: Settings, replica: str) -> T:
        beating = asyncio.create_task(_beat())
        try:
            return await serve(settings, replica)
        finally:
            beating.cancel()
            faulthandler.cancel_dump_traceback_later()

    return watched


async def _beat() -> None:
    while True:
        faulthandler.dump_traceback_later(LATE_S)
        await asyncio.sleep(_PERIOD_S)


if __name__ == "__main__":
    leave(main("reward", with_stacks(run)))
