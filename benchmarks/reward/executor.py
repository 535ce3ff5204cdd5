"""Isolated executions per second, relative to bare ``python3 -I``.

The program imports 14 standard-library modules and prints a line, one per core at a time. The executor uses the host's
strongest tier (or ``--isolation``) and a fork per program. ``ratio``: median of the executor's rate / the bare rate.

    python -m benchmarks.reward.executor --programs 200 --rounds 7
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from penstock.shared.errors import TemporaryError
from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import Job, Outcome

PROGRAM = """
import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, itertools, json, math, random, re, statistics
print(json.dumps(sum(int(line) for line in "1 2 3".split())))
"""
START_WITHIN_S = 60.0
Way = Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def executor(isolation: str, slots: int) -> AsyncIterator[ExecutorClient]:
    """Yield a client of a new executor. Raises SystemExit: it failed; includes its standard error."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        address = f"unix:{folder}/executor.sock"
        command = [sys.executable, "-m", "penstock.services.reward.executor", "--reward.executor.address", address]
        command += ["--reward.executor.isolation", isolation, "--reward.executor.slots", str(slots)]
        command += ["--internal.executor_profiles", '["stdlib"]', "--telemetry.log_level", "ERROR"]
        messages = Path(folder) / "stderr"
        with messages.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=stderr)
        client = ExecutorClient(address)
        try:
            async with asyncio.timeout(START_WITHIN_S):
                if not await _answers(client, process):
                    raise SystemExit(messages.read_text(errors="replace").strip())
            yield client
        finally:
            await client.close()
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _answers(client: ExecutorClient, process: asyncio.subprocess.Process) -> bool:
    ended = asyncio.ensure_future(process.wait())
    asked = asyncio.ensure_future(_until_it_answers(client))
    try:
        await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await asked
        return asked.done()
    finally:
        ended.cancel()
        asked.cancel()


async def _until_it_answers(client: ExecutorClient) -> None:
    while True:
        with contextlib.suppress(TemporaryError):
            assert (await client.run(Job("print(1)"))).outcome is Outcome.FINISHED
            return


async def cold() -> None:
    """Run in a fresh Python."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", PROGRAM, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out == b"6\n"


async def round_of(way: Way, programs: int, at_a_time: int) -> tuple[float, list[float]]:
    """Return the seconds of all ``programs``, and of each."""
    seconds: list[float] = []
    left = iter(range(programs))

    async def worker() -> None:
        for _ in left:
            started_s = time.perf_counter()
            await way()
            seconds.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_a_time)))
    return time.perf_counter() - started_s, seconds


async def measure(isolation: str, programs: int, rounds: int) -> dict[str, float | int | str]:
    """Return the result."""
    cores = len(os.sched_getaffinity(0))
    async with executor(isolation, cores) as client:
        tiers: set[str] = set()

        async def isolated() -> None:
            ended = await client.run(Job(PROGRAM))
            assert (ended.outcome, ended.stdout) == (Outcome.FINISHED, "6\n"), ended
            tiers.add(ended.tier)

        totals: dict[str, list[float]] = {"isolated": [], "cold": []}
        each: dict[str, list[float]] = {"isolated": [], "cold": []}
        for number in range(rounds + 1):  # the first round warms up
            for name, way in (("isolated", isolated), ("cold", cold)):
                total_s, seconds = await round_of(way, programs, cores)
                if number:
                    totals[name].append(total_s)
                    each[name] += seconds
    return _figures(totals, each, programs) | {
        "tier": "+".join(tiers),
        "cores": cores,
        "programs": programs,
        "rounds": rounds,
    }


def _figures(
    totals: dict[str, list[float]], each: dict[str, list[float]], programs: int
) -> dict[str, float | int | str]:
    ratios = [bare / ours for ours, bare in zip(totals["isolated"], totals["cold"], strict=True)]
    figures: dict[str, float | int | str] = {"ratio": round(statistics.median(ratios), 2)}
    for name, prefix in (("isolated", ""), ("cold", "bare_")):
        centiles = statistics.quantiles(each[name], n=100)
        figures[f"{prefix}per_s"] = round(programs / statistics.median(totals[name]), 1)
        figures[f"{prefix}p50_ms"] = round(centiles[49] * 1e3, 2)
        figures[f"{prefix}p95_ms"] = round(centiles[94] * 1e3, 2)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200, help="programs of one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isolation", default="auto", choices=["auto", "namespace", "landlock", "unsafe"])
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.isolation, arguments.programs, arguments.rounds))))


if __name__ == "__main__":
    main()
