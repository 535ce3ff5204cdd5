"""Requests to the embedded engine's thread, and their answers: futures set in the event loop, unless cancelled."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from penstock.services.rollout.engines.engine import EngineDied, GeneratedGroup, GenerationRequest, SwapReport
from penstock.shared.bus.messages import Float32Array, Int32Array, PolicyVersion

R = TypeVar("R")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    request: GenerationRequest
    answer: "asyncio.Future[GeneratedGroup]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Swap:
    version: PolicyVersion
    answer: "asyncio.Future[SwapReport]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    token_ids: Int32Array
    answer: "asyncio.Future[Float32Array]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Suspend:
    """Pause between two decoding steps, and free memory down to ``rung``."""

    rung: int
    answer: "asyncio.Future[None]"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Resume:
    answer: "asyncio.Future[None]"


class Close:
    """Request to stop."""


Item: TypeAlias = Request | Swap | ScoreRequest | Suspend | Resume
Reply: TypeAlias = (
    "asyncio.Future[GeneratedGroup] | asyncio.Future[SwapReport] | asyncio.Future[Float32Array] | asyncio.Future[None]"
)


def answer(future: "asyncio.Future[R]", result: R) -> None:
    if not future.done():
        future.set_result(result)


def answer_all(answers: "Sequence[tuple[asyncio.Future[R], R]]") -> None:
    """Set answers that came together, for those who wait to see them together."""
    for future, result in answers:
        answer(future, result)


def refuse(future: "asyncio.Future[R]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def end(future: Reply, death: BaseException | None) -> None:
    """Cancel, or set the thread's error."""
    if future.done():
        return
    if death is None:
        future.cancel()
        return
    error = EngineDied(f"the engine's thread died: {death!r}")
    error.__cause__ = death
    future.set_exception(error)
