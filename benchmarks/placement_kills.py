"""Kill -9 of each holder of a shared device in each rung, drawn by seed, with the audit after each run.

    python -m benchmarks.placement_kills --seconds 600 --seed 1

A run for each mode (``shared``, ``lend``) and rung in turn, on CPUs with the transformers engine, until the time is
over. In each, holders are killed at a random moment of their turns; a recovery is the next commit. With ``lend`` the
ordinary replica takes no prompts after the first step, so every sample needs a lend. Needs the extra ``dev``.
"""

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from shared.bus.bus import Bus
from shared.bus.stores.replicas.device_leases import look_at_devices
from shared.settings.placement import RUNGS
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, left_behind, running
from tests.chaos.switches import LEND, SHARED

_LONGEST_S = 0.5
"""Into a turn, at which its holder is killed at the latest."""


async def _kill(run: Run, bus: Bus, holder: str, after_s: float) -> None:
    """Kill ``holder`` while it has the device, ``after_s`` into its turn, or earlier in a shorter one."""

    async def is_held() -> bool:
        grant = (await look_at_devices(bus, 1)).grants[0]
        return grant is not None and grant.replica == holder

    pid = run.pid(holder)
    while run.pid(holder) == pid and pid is not None:
        await run.until(is_held)
        await asyncio.sleep(after_s)
        if await is_held():
            os.kill(pid, signal.SIGKILL)
            break
        after_s /= 2
    await run.until(lambda: run.pid(holder) not in (None, pid))


async def _run(folder: Path, mode: str, rung: int, kills: int, lot: random.Random) -> dict[str, Any]:
    """Return what was killed and how long recoveries took; raises AssertionError if the audit is not exact."""
    lend = mode == "lend"
    holders, killed, recoveries = ("trainer-0", "guest-0" if lend else "rollout-0"), Counter[str](), list[float]()
    async with running(folder, flags={**(LEND if lend else SHARED), "placement.rung": rung}) as run:
        bus = await run.connect()
        await run.more_steps(bus, 1)
        if lend:
            await run.command("/v1/services/rollout-0/cordon")
        for number in range(kills):
            holder = holders[number % 2]
            await _kill(run, bus, holder, lot.uniform(0.0, _LONGEST_S))
            killed[holder], started_s = killed[holder] + 1, time.monotonic()
            await run.more_steps(bus, 1)
            recoveries.append(time.monotonic() - started_s)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        counts = await audit_groups(bus)
        await audit_versions(bus)
    return {
        "mode": mode,
        "rung": rung,
        "killed": killed,
        "recoveries": len(recoveries),
        "recovery_s_max": round(max(recoveries), 2),
        "groups": counts,
    }


async def _campaign(seconds: float, seed: int, kills: int) -> dict[str, Any]:
    lot, end_s, runs, failure = random.Random(seed), time.monotonic() + seconds, list[dict[str, Any]](), ""
    for mode, rung in itertools.cycle(itertools.product(("lend", "shared"), RUNGS)):
        if time.monotonic() >= end_s:
            break
        with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
            try:
                runs.append(await _run(Path(scratch), mode, rung, kills, lot))
            except (AssertionError, TimeoutError) as error:
                failure = f"{mode}, rung {rung}: {error}"
                break
        logging.warning("%s", runs[-1])
    return {
        "seed": seed,
        "kills": sum(sum(run["killed"].values()) for run in runs),
        "recoveries": sum(run["recoveries"] for run in runs),
        "audit_exact": not failure,
        "failure": failure,
        "runs": runs,
    }


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="no run starts later")
    parser.add_argument("--kills", type=int, default=6, help="in each run, trainer and replica in turn")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    figures = asyncio.run(_campaign(arguments.seconds, arguments.seed, arguments.kills))
    print(json.dumps({"benchmark": "placement_kills", "cpus": os.cpu_count(), **figures}))


if __name__ == "__main__":
    main()
