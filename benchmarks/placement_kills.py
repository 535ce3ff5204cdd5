"""Kill -9 of each holder of a shared device in each rung, drawn by seed, with the audit after each run.

    python -m benchmarks.placement_kills --seconds 600 --seed 1
    python -m benchmarks.placement_kills --seconds 420 --device cuda --runs 5 --kills 10 --parallel 8

A run for each rung in turn, ``--runs`` times or until the time is over; ``--parallel`` of them at a time. In
each, trainer and replica are killed alternately, at a random moment of their turns; a recovery lasts from the kill to
the first commit after the process has started again. A run's moments depend on the seed, its rung and number. Each
finished run prints its row. When the time is over, running ones are stopped and not counted; so are they after a failure, which
ends the campaign.

The engine is transformers, which starts fast. ``--device cuda`` puts all runs on the first GPU, with bf16 weights and
torch's kernels, which need no compilation; that was not tried yet. Starts are forks of a process with imported
libraries if a trial shows that forks can use the GPU, else ordinary processes. Other flags go to ``penstock up``, as
``--name=value``. Needs neither pytest nor another package of the extra ``dev``.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.device_leases import look_at_devices
from penstock.shared.settings.placement import RUNGS
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, left_behind, running
from tests.chaos.switches import SHARED

_LONGEST_S = 0.5
"""Into a turn, at which its holder is killed at the latest."""
_STOP_S = 60.0
"""For runs to stop when the time is over."""
_TRIAL_S = 180.0
"""For a first import without byte code."""
_FLAGS: Mapping[str, Mapping[str, object]] = {
    "cpu": {},
    "cuda": {
        "run.device": "cuda",
        "policy.dtype": "bfloat16",
        "trainer.kernels": "torch",
        "rollout.engine": "transformers",
    },
}
_CUDA = {"DS_ACCELERATOR": "cuda", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment in which libraries can be imported without a CUDA context, which forks could not use."""
_TRIAL = """
import importlib, os
from tests.support.forge import IMPORTED
for name in IMPORTED:
    importlib.import_module(name)
child = os.fork()
if child == 0:
    import torch
    torch.zeros(1, device="cuda")
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""


async def _kill(run: Run, bus: Bus, holder: str, after_s: float) -> float:
    """Kill ``holder`` while it has the device, ``after_s`` into its turn, or earlier in a shorter one; return the time."""

    async def is_held() -> bool:
        grant = (await look_at_devices(bus, 1)).grants[0]
        return grant is not None and grant.replica == holder

    while True:
        await run.until(is_held)
        pid = run.pid(holder)
        await asyncio.sleep(after_s)
        if pid is not None and pid == run.pid(holder) and await is_held():
            break
        after_s /= 2
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    await run.until(lambda: run.pid(holder) not in (None, pid))
    return killed_s


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of the campaign."""

    seed: int
    rung: int
    number: int


def jobs(seed: int, rungs: Sequence[int], runs: int) -> Iterator[Job]:
    """Yield a job for each rung, ``runs`` times; 0: for ever.

    >>> [(job.rung, job.number) for job in jobs(1, [0, 4], 2)]
    [(0, 0), (4, 0), (0, 1), (4, 1)]
    """
    for number in range(runs) if runs else itertools.count():
        for rung in rungs:
            yield Job(seed, rung, number)


async def _run(job: Job, kills: int, flags: Mapping[str, object], *, forked: bool) -> dict[str, Any]:
    """Return what was killed and how long recoveries took; raises AssertionError if the audit is not exact."""
    lot, holders = random.Random(str(job)), ("trainer-0", "rollout-0")
    killed, recoveries = Counter[str](), list[float]()
    placement = {**SHARED, "placement.rung": job.rung}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as scratch:
        async with running(Path(scratch), flags={**placement, **flags}, forked=forked) as run:
            try:
                bus = await run.connect()
                await run.more_steps(bus, 1)
                for number in range(kills):
                    holder = holders[number % 2]
                    killed_s = await _kill(run, bus, holder, lot.uniform(0.0, _LONGEST_S))
                    killed[holder] += 1
                    await run.more_steps(bus, 1)
                    recoveries.append(time.monotonic() - killed_s)
                await bus.close()
                await run.stop()
            except asyncio.CancelledError:
                run.process.terminate()  # with the one of `running`, the second: at once
                raise
        async with left_behind(run) as bus:
            counts = await audit_groups(bus)
            await audit_versions(bus)
    return {
        "rung": job.rung,
        "killed": killed,
        "recoveries": len(recoveries),
        "recovery_s_median": round(statistics.median(recoveries), 2),
        "recovery_s_max": round(max(recoveries), 2),
        "seconds": round(time.monotonic() - began_s, 1),
        "groups": counts,
    }


async def _campaign(arguments: argparse.Namespace, flags: Mapping[str, object], *, forked: bool) -> dict[str, Any]:
    waiting = jobs(arguments.seed, arguments.rungs, arguments.runs)
    rows: list[dict[str, Any]] = []

    async def work() -> None:
        for job in waiting:
            rows.append(await _run(job, arguments.kills, flags, forked=forked))
            print(json.dumps(rows[-1]), flush=True)

    workers = [asyncio.create_task(work()) for _ in range(arguments.parallel)]
    await asyncio.wait(workers, timeout=arguments.seconds, return_when=asyncio.FIRST_EXCEPTION)
    failures = [str(worker.exception()) for worker in workers if worker.done() and worker.exception()]
    for worker in workers:
        worker.cancel()
    await asyncio.wait(workers, timeout=_STOP_S)
    return {**totals(rows), "audit_exact": bool(rows) and not failures, "failures": failures, "runs": rows}


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the kills and recoveries of all runs, and the kills of each rung.

    >>> row = {"rung": 4, "killed": {"trainer-0": 2, "rollout-0": 1}, "recoveries": 3}
    >>> totals([row, row])
    {'kills': 6, 'recoveries': 6, 'kills_by_rung': {4: {'trainer-0': 4, 'rollout-0': 2}}}
    """
    by_rung: dict[int, Counter[str]] = {}
    for row in rows:
        by_rung.setdefault(row["rung"], Counter()).update(row["killed"])
    return {
        "kills": sum(counter.total() for counter in by_rung.values()),
        "recoveries": sum(row["recoveries"] for row in rows),
        "kills_by_rung": {name: dict(counter) for name, counter in sorted(by_rung.items())},
    }


def _forks_can_use_cuda() -> bool:
    command = [sys.executable, "-c", _TRIAL]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"forks cannot use the GPU, so processes start as usual: {error}: {str(error.stderr)[-300:]}", flush=True)
        return False
    return True


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of all runs; stopping them may take a minute more"
    )
    parser.add_argument("--kills", type=int, default=6, help="in each run, trainer and replica alternately")
    parser.add_argument("--runs", type=int, default=0, help="of each rung; 0: until the time is over")
    parser.add_argument("--rungs", nargs="+", type=int, choices=RUNGS, default=list(RUNGS))
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", choices=sorted(_FLAGS), default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    arguments, more = parser.parse_known_args()
    flags = {**_FLAGS[arguments.device], **dict(flag.removeprefix("--").split("=", 1) for flag in more)}
    forked = True
    if arguments.device == "cuda":
        os.environ.update(_CUDA)
        forked = _forks_can_use_cuda()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads would take the cores from other runs
    figures = asyncio.run(_campaign(arguments, flags, forked=forked))
    shown = {"seed": arguments.seed, "device": arguments.device, "parallel": arguments.parallel, "forked": forked}
    print(json.dumps({"benchmark": "placement_kills", "cpus": os.cpu_count(), **shown, "flags": flags, **figures}))


if __name__ == "__main__":
    main()
