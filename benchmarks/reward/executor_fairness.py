"""Slowdown and timeouts of an honest program beside three hostile ones, in one executor.

``slowdown``: time from request to answer beside hostile programs / alone, waits for a slot included; ``control``: the
machine's noise. ``waited_s``: wait for a slot. ``timeouts``: over ``DEADLINE`` times the CPU time alone. The kind
``a loop`` is a harmless neighbour. Fails if the slowdown's p95 is over ``LARGEST_SLOWDOWN`` or a program timed out.
``--seconds`` bounds the measurement; it ends after the kind of program that is being measured.

    python -m benchmarks.reward.executor_fairness --rounds 5 --seconds 150
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator

from benchmarks.reward.executor import executor
from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import Execution, Job, Limits, Outcome

DEADLINE = 3.0
LARGEST_SLOWDOWN = 1.5
HOSTILE_PROGRAMS = 3
HONEST = "n = 0\nfor i in range({loops}): n += i * i\nprint(n)"
_THREADS = """
import _thread, threading, time
threading.stack_size(1 << 16)
def start(act):
    try:
        while True: _thread.start_new_thread(act, ())
    except RuntimeError: act()
"""
HOSTILE = {
    "a loop": "while True: pass",
    "threads": f"import hashlib\n{_THREADS}\ndef act():\n  while True: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 20000)\nstart(act)",
    "memory bandwidth": "a, b = bytearray(64 << 20), bytes(64 << 20)\nwhile True: a[:] = b",
    "page faults": "import mmap\nwhile True:\n  m = mmap.mmap(-1, 64 << 20)\n  for i in range(0, 64 << 20, 4096): m[i] = 1\n  m.close()",
    "own files": (
        "import os\nblock = bytes(8 << 20)\nwhile True:\n  try:\n    open('/tmp/x', 'wb').write(block); os.unlink('/tmp/x')\n"
        "  except OSError: pass"
    ),
    "barriers": f"import ctypes\n{_THREADS}\nlibc = ctypes.CDLL(None)\ndef act():\n  while True: libc.syscall(324, 1 << 3, 0, 0)\nstart(act)",
    "forks": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "values": "import os\nwhile True: os.write(3, b'value 1\\n' * 8192)",
}
_PATIENT = Limits(wall_s=60.0, cpu_s=60.0)
_HOSTILE_LIMITS = Limits(wall_s=2.0, cpu_s=2.0, memory_bytes=512 << 20)
_SETTLE_S = (0.3, 2.3)
"""Seconds for hostile programs to start: the honest one meets them at any age."""


@contextlib.asynccontextmanager
async def beside(client: ExecutorClient, code: str, settle_s: float) -> AsyncIterator[None]:
    """Keep hostile programs running."""

    async def again() -> None:
        while True:
            await client.run(Job(code, limits=_HOSTILE_LIMITS))

    tasks = [asyncio.create_task(again()) for _ in range(HOSTILE_PROGRAMS)]
    try:
        await asyncio.sleep(settle_s)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclasses.dataclass(frozen=True)
class Honest:
    """An honest program's run."""

    execution: Execution
    total_s: float
    """From request to answer."""

    @classmethod
    async def run(cls, client: ExecutorClient, loops: int, limits: Limits = _PATIENT) -> "Honest":
        """Run it."""
        asked_s = time.monotonic()
        execution = await client.run(Job(HONEST.format(loops=loops), limits=limits))
        assert execution.outcome in (Outcome.FINISHED, Outcome.TIMEOUT), execution
        return cls(execution, time.monotonic() - asked_s)


@dataclasses.dataclass(frozen=True)
class Round:
    """One honest program alone, alone again, and beside a kind of hostile programs."""

    kind: str
    alone: Honest
    again: Honest
    crowded: Honest

    @property
    def slowdown(self) -> float:
        """Time beside hostile programs / alone."""
        return self.crowded.total_s / self.again.total_s


async def rounds(client: ExecutorClient, count: int, seconds: float, loops: int, limits: Limits) -> list[Round]:
    """Measure each kind up to ``count`` times."""
    made: list[Round] = []
    until_s, lot = time.monotonic() + seconds, random.Random(0)
    for kind, code in list(HOSTILE.items()) * count:
        if time.monotonic() > until_s:
            break
        alone, again = [await Honest.run(client, loops) for _ in range(2)]
        async with beside(client, code, lot.uniform(*_SETTLE_S)):
            made.append(Round(kind, alone, again, await Honest.run(client, loops, limits)))
    return made


async def measure(isolation: str, count: int, seconds: float, loops: int) -> dict[str, object]:
    """Return the result."""
    async with executor(isolation, 0) as client:
        first = [await Honest.run(client, loops) for _ in range(3)]
        limits = Limits(wall_s=DEADLINE * min(each.execution.cpu_s for each in first), cpu_s=60.0)
        made = await rounds(client, count, seconds, loops, limits)
    figures = {
        "slowdown": [each.slowdown for each in made],
        "control": [each.again.total_s / each.alone.total_s for each in made],
        "cpu_slowdown": [each.crowded.execution.cpu_s / each.again.execution.cpu_s for each in made],
        "waited_s": [each.crowded.total_s - each.crowded.execution.wall_s for each in made],
    }
    kinds = {kind: [each.slowdown for each in made if each.kind == kind] for kind in HOSTILE}
    return {
        **{f"{name}_{centile}": value for name, of in figures.items() for centile, value in _centiles(of).items()},
        "timeouts": sum(each.crowded.execution.outcome is Outcome.TIMEOUT for each in made),
        "runs": len(made),
        "kinds": {kind: _centiles(values) for kind, values in kinds.items() if values},
        "alone_s": round(statistics.median(each.total_s for each in first), 3),
        "alone_cpu_s": round(statistics.median(each.execution.cpu_s for each in first), 3),
        "hostile": HOSTILE_PROGRAMS,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "tier": first[0].execution.tier,
    }


def _centiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": round(values[0], 2), "p95": round(values[0], 2)}
    centiles = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(centiles[49], 2), "p95": round(centiles[94], 2)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--loops", type=int, default=3_000_000, help="length of the honest program")
    parser.add_argument("--isolation", default="auto", choices=["auto", "namespace", "landlock", "unsafe"])
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.isolation, arguments.rounds, arguments.seconds, arguments.loops))
    print(json.dumps({"benchmark": "executor_fairness"} | result))
    if float(str(result["slowdown_p95"])) > LARGEST_SLOWDOWN or result["timeouts"]:
        sys.exit(f"expected a slowdown of at most {LARGEST_SLOWDOWN} (p95) and no timeout")


if __name__ == "__main__":
    main()
