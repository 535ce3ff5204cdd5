"""Laws of work that runs at the same time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.shared.tasks import beside, together


class Work:
    """Runs until it is cancelled."""

    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), False

    async def run(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def fail(after: asyncio.Event) -> None:
    await after.wait()
    raise OSError("it broke")


async def test_work_beside_a_body_ends_with_it() -> None:
    work = Work()
    async with beside(work.run()):
        await work.began.wait()
        assert not work.cancelled
    assert work.cancelled


async def run_beside(body: Coroutine[Any, Any, object], *works: Coroutine[Any, Any, object]) -> None:
    async with beside(*works):
        await body


async def test_an_error_beside_a_body_ends_the_body_and_all_other_work() -> None:
    work, body = Work(), Work()
    with pytest.raises(ExceptionGroup) as caught:
        await run_beside(body.run(), work.run(), fail(work.began))
    assert (caught.group_contains(OSError, match="it broke"), work.cancelled, body.cancelled) == (True, True, True)


async def test_an_error_of_the_body_ends_the_work_beside_it() -> None:
    work = Work()
    with pytest.raises(ExceptionGroup) as caught:
        await run_beside(fail(work.began), work.run())
    assert (caught.group_contains(OSError), work.cancelled) == (True, True)


async def test_results_are_in_the_order_of_the_work() -> None:
    second = asyncio.Event()

    async def first() -> str:
        await second.wait()
        return "first"

    async def other() -> str:
        second.set()
        return "other"

    assert await together([first(), other()]) == ["first", "other"]


async def test_an_error_ends_the_work_that_runs_together_with_it() -> None:
    work = Work()
    with pytest.raises(ExceptionGroup) as caught:
        await together([work.run(), fail(work.began)])
    assert (caught.group_contains(OSError), work.cancelled) == (True, True)
