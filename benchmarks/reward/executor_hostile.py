"""Whether garbage output can end or stall the executor's single-threaded supervisor.

``stall_ms`` is the longest answer to requests without a slot, while ``RESULTS`` run; ``control_ms`` with harmless
programs.

    python -m benchmarks.reward.executor_hostile --programs 20000
"""

import argparse
import asyncio
import collections
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.reward.executor import PROGRAM, executor
from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import Call, Job, Limits, Outcome

FINISHED, ERROR, OVER = Outcome.FINISHED, Outcome.RUNTIME_ERROR, Outcome.OUTPUT_LIMIT
RESULTS: dict[str, tuple[str, Outcome]] = {
    "values without end": (r"os.write(3, b'value 0\n' * (1 << 17)); os._exit(0)", ERROR),
    "lines without end": (r"os.write(3, b'value 0\n' + b'\n' * 1000000); os._exit(0)", FINISHED),
    "a value without end": (r"os.write(3, b'value [' + b'[],' * 300000 + b'0]\n'); os._exit(0)", FINISHED),
    "a deep value": (r"os.write(3, b'value ' + b'[' * 500000 + b'\n'); os._exit(0)", ERROR),
    "a value that is no JSON": (r"os.write(3, b'value 1],[2\n'); os._exit(0)", ERROR),
    "a value that is no text": (r"os.write(3, b'value \"' + b'\xff' * 1000000 + b'\"\n'); os._exit(0)", FINISHED),
    "a number without end": (r"os.write(3, b'value ' + b'9' * 1000000 + b'\n'); os._exit(0)", ERROR),
    "half a value": (r"os.write(3, b'value \"x'); os._exit(0)", ERROR),
    "no value": ("os._exit(0)", ERROR),
    "an error without end": (r"os.write(3, b'error ' + b'x' * 1000000); os._exit(1)", ERROR),
    "a beginning again": (r"os.write(3, b'ready\nready\nvalue 1\n'); os._exit(0)", ERROR),
    "zeros": (r"os.write(3, bytes(1000000)); os._exit(0)", ERROR),
    "output that is no text": (r"os.write(1, b'\xff' * 1000000); os.write(3, b'value 1\n'); os._exit(0)", FINISHED),
    "too much output": (r"os.write(1, b'\xf0' * 2000000)", OVER),
    "too much report": (r"os.write(3, b'\n' * 2000000)", OVER),
    "an exit status": ("os._exit(113)", Outcome.MEMORY),
    "a signal": ("signal.raise_signal(6)", ERROR),
    "closed descriptors": ("os.closerange(0, 64); os._exit(0)", ERROR),
    "a forbidden call": ("ctypes.CDLL(None).unshare(1 << 28)", Outcome.FORBIDDEN),
    "a feigned marker": (r"os.write(3, b'error no namespaces\n'); os._exit(1)", ERROR),
}
"""Program and required outcome, by kind."""
_LIMITS = Limits(wall_s=60.0, cpu_s=10.0, memory_bytes=256 << 20)
_AT_A_TIME = 8


def job(kind: str) -> Job:
    """Return the program of ``kind``."""
    return Job(f"import ctypes, os, signal\n{RESULTS[kind][0]}", calls=(Call("f"),), limits=_LIMITS)


async def flood(client: ExecutorClient, jobs: list[tuple[Job, Outcome]], programs: int) -> collections.Counter[str]:
    """Run ``programs`` of ``jobs``; return counts by outcome. Raises AssertionError: a wrong outcome."""
    outcomes: collections.Counter[str] = collections.Counter()
    left = itertools.islice(itertools.cycle(jobs), programs)

    async def some() -> None:
        for job, expected in left:
            execution = await client.run(job)
            assert execution.outcome is expected, (job.code, execution)
            outcomes[execution.outcome.value] += 1

    await asyncio.gather(*(some() for _ in range(_AT_A_TIME)))
    return outcomes


async def ask(address: str) -> list[float]:
    """Query until standard input ends; return each answer's milliseconds."""
    answers_ms: list[float] = []
    asker, ends = ExecutorClient(address), asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not ends.done():
        started_s = time.perf_counter()
        await asker.run(Job("", profile="nothing"))
        answers_ms.append((time.perf_counter() - started_s) * 1e3)
        await asyncio.sleep(0.002)
    await asker.close()
    return answers_ms


async def _answers_ms(
    client: ExecutorClient, jobs: list[tuple[Job, Outcome]], programs: int
) -> tuple[list[float], collections.Counter[str]]:
    command = [sys.executable, "-m", "benchmarks.reward.executor_hostile", "--ask", client.address]
    asker = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        outcomes = await flood(client, jobs, programs)
    finally:
        printed, _ = await asker.communicate(b"")  # without input it keeps the pipe open
    return json.loads(printed), outcomes


async def measure(isolation: str, programs: int) -> dict[str, object]:
    """Return the result."""
    hostile = [(job(kind), outcome) for kind, (_, outcome) in RESULTS.items()]
    async with executor(isolation, len(os.sched_getaffinity(0))) as client:
        control_ms, _ = await _answers_ms(client, [(Job(PROGRAM), FINISHED)], programs // 4)
        started_s = time.perf_counter()
        stalls_ms, outcomes = await _answers_ms(client, hostile, programs)
        total_s = time.perf_counter() - started_s
    return {
        "programs": programs,
        "per_s": round(programs / total_s, 1),
        **_figures("stall", stalls_ms),
        **_figures("control", control_ms),
        "outcomes": dict(outcomes),
        "cores": len(os.sched_getaffinity(0)),
    }


def _figures(name: str, seconds_ms: list[float]) -> dict[str, float]:
    centiles = statistics.quantiles(seconds_ms, n=1000)
    return {
        f"{name}_p50_ms": round(centiles[499], 2),
        f"{name}_p999_ms": round(centiles[998], 2),
        f"{name}_ms": round(max(seconds_ms), 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--isolation", default="auto", choices=["auto", "namespace", "landlock", "unsafe"])
    parser.add_argument(
        "--ask",
        metavar="ADDRESS",
        help="ask the executor there until standard input ends (the benchmark starts this itself)",
    )
    arguments = parser.parse_args()
    if arguments.ask:
        print(json.dumps(asyncio.run(ask(arguments.ask))))
        return
    print(json.dumps(asyncio.run(measure(arguments.isolation, arguments.programs))))


if __name__ == "__main__":
    main()
