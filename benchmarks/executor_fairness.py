"""Slowdown and timeouts of an honest program beside three hostile ones, in one executor.

``slowdown``: wall time beside hostile programs / alone; ``control``: the machine's noise. ``waited_s``: wait for a
slot. ``timeouts``: over ``DEADLINE`` times the CPU time alone. The kind ``a loop`` is a harmless neighbour.

    python -m benchmarks.executor_fairness --rounds 10
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import statistics
import time
from collections.abc import AsyncIterator

from benchmarks.executor import executor
from services.reward.executor.client import ExecutorClient
from services.reward.executor.protocol import Execution, Job, Limits, Outcome

DEADLINE = 3.0
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
_SETTLE_S = 0.3
"""Seconds for hostile programs to start."""


@contextlib.asynccontextmanager
async def beside(client: ExecutorClient, code: str, programs: int) -> AsyncIterator[None]:
    """Keep ``programs`` hostile programs running."""

    async def again() -> None:
        while True:
            await client.run(Job(code, limits=_HOSTILE_LIMITS))

    tasks = [asyncio.create_task(again()) for _ in range(programs)]
    try:
        await asyncio.sleep(_SETTLE_S)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def honest(client: ExecutorClient, loops: int, limits: Limits) -> Execution:
    """Run the honest program."""
    execution = await client.run(Job(HONEST.format(loops=loops), limits=limits))
    assert execution.outcome in (Outcome.FINISHED, Outcome.TIMEOUT), execution
    return execution


async def measure(isolation: str, rounds: int, loops: int) -> dict[str, object]:
    """Return the result."""
    slowdowns: dict[str, list[float]] = collections.defaultdict(list)
    control: list[float] = []
    cpu: list[float] = []
    waited_s: list[float] = []
    timeouts: collections.Counter[str] = collections.Counter()
    async with executor(isolation, 0) as client:
        first = [await honest(client, loops, _PATIENT) for _ in range(3)]
        limits = Limits(wall_s=DEADLINE * min(run.cpu_s for run in first), cpu_s=60.0)
        for _ in range(rounds):
            for kind, code in HOSTILE.items():
                alone, again = [await honest(client, loops, _PATIENT) for _ in range(2)]
                async with beside(client, code, HOSTILE_PROGRAMS):
                    asked_s = time.monotonic()
                    crowded = await honest(client, loops, limits)
                    waited_s.append(time.monotonic() - asked_s - crowded.wall_s)
                timeouts[kind] += crowded.outcome is Outcome.TIMEOUT
                slowdowns[kind].append(crowded.wall_s / again.wall_s)
                control.append(again.wall_s / alone.wall_s)
                cpu.append(crowded.cpu_s / again.cpu_s)
    every = [slowdown for kind in slowdowns.values() for slowdown in kind]
    return {
        **{f"slowdown_{name}": value for name, value in _centiles(every).items()},
        **{f"control_{name}": value for name, value in _centiles(control).items()},
        **{f"cpu_slowdown_{name}": value for name, value in _centiles(cpu).items()},
        **{f"waited_s_{name}": value for name, value in _centiles(waited_s).items()},
        "timeouts": timeouts.total(),
        "runs": len(every),
        "kinds": {kind: _centiles(values) | {"timeouts": timeouts[kind]} for kind, values in slowdowns.items()},
        "alone_s": round(statistics.median(run.wall_s for run in first), 3),
        "alone_cpu_s": round(statistics.median(run.cpu_s for run in first), 3),
        "hostile": HOSTILE_PROGRAMS,
        "cores": len(os.sched_getaffinity(0)),
        "tier": first[0].tier,
    }


def _centiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": round(values[0], 2), "p95": round(values[0], 2)}
    centiles = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(centiles[49], 2), "p95": round(centiles[94], 2)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--loops", type=int, default=3_000_000, help="length of the honest program")
    parser.add_argument("--isolation", default="auto", choices=["auto", "namespace", "landlock", "unsafe"])
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.isolation, arguments.rounds, arguments.loops))))


if __name__ == "__main__":
    main()
