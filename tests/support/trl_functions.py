"""Reward functions with TRL's signature for tests of their scorer, separate so that its processes import little."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def obey(completions: list[str], **_: Any) -> list[float]:
    """Do what the completions say."""
    match completions[-1].split():
        case ["raise"]:
            raise ZeroDivisionError("no")
        case ["exit"]:
            sys.exit(0)
        case ["die"]:
            os._exit(3)
        case ["hang"]:
            time.sleep(600)
        case ["nan"]:
            return [1.0] * (len(completions) - 1) + [float("nan")]
        case ["short"]:
            return [1.0]
        case ["text"]:
            return ["1.0"] * len(completions)  # type: ignore[list-item]
    return [float(len(text)) for text in completions]


def unsure(completions: list[str], **_: Any) -> list[float | None]:
    return [None if text == "?" else 10.0 for text in completions]


async def later(completions: list[str], level: list[int], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(value) / 2 for value in level]


def logging(completions: list[str], log_extra: Any, log_metric: Callable[[str, float], None], **_: Any) -> list[float]:
    log_extra("place", list(range(len(completions))))
    log_metric("count", 1.0)
    log_metric("count", 2.0)
    return [0.5] * len(completions)


def scaled(factor: float) -> Callable[..., list[float]]:
    def scale(completions: list[str], **_: Any) -> list[float]:
        return [factor * len(text) for text in completions]

    return scale


def of_environments(environments: Sequence[Any], **_: Any) -> list[float]:
    return [environment.reward for environment in environments]


def of_optional_environments(completions: Sequence[str], environments: object = None, **_: Any) -> list[float]:
    return [float(environments is None) for _ in completions]
