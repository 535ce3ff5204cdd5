"""Work that runs at the same time, on one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run ``works`` during the body and cancel them at its end. An error of one ends the body, in an exception group."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what ``works`` return, in their order. An error of one cancels the others, in an exception group."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
    return [task.result() for task in running]
