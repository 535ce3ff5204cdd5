"""Waits and free ports of tests and of benchmarks that use them; imports no test framework."""

import asyncio
import contextlib
import inspect
import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = float(os.environ.get("PENSTOCK_PATIENCE_S", "180"))
"""Timeout of waits on a busy machine."""


def _ports() -> Iterator[int]:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(max(1024, lowest - 16_000), lowest) or range(1024, 32_768)
    return itertools.cycle(random.SystemRandom().sample(ports, len(ports)))


_PORTS = _ports()


def free_port() -> int:
    """Return a port that the kernel gives to no other process, as it is below those of connections and of port 0."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def until(condition: object, timeout_s: float = PATIENCE_S) -> None:
    """Wait until ``condition()`` (sync or async) is true.

    Raises:
        TimeoutError: with the condition and its last value.
    """
    answer: object = "no answer"
    pause_s = 0.01
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                answer = condition()  # type: ignore[operator]
                if asyncio.iscoroutine(answer):
                    waiting, answer = answer, "no answer"
                    answer = await waiting
                if answer:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(1.02 * pause_s, 0.1)
    except TimeoutError as error:
        raise TimeoutError(f"waited {timeout_s:g} s for `{words(condition)}`, found last: {answer!r}") from error


def words(condition: object) -> str:
    name = str(getattr(condition, "__qualname__", condition))
    if name.endswith("<lambda>"):
        with contextlib.suppress(OSError, TypeError):
            return " ".join(inspect.getsource(condition).split())  # type: ignore[arg-type]
    return name
