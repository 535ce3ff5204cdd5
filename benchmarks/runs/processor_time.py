"""Processor time of a step of the arithmetic example, by process, before and after: two checkouts, alternately.

    python -m benchmarks.runs.processor_time --before ../earlier --steps 40 --rounds 2

``milliseconds`` are user and system time of a step over steps 5 to the last but one, from ``/proc``, medians over rounds;
other work on the machine changes them less than seconds, but not nothing. ``ratio``: after / before, of each round.
Runs are ended after their last step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.pipeline import end, logs_of, steps_of
from benchmarks.peers.work import ROOT

_FIRST_STEP = 5
_POLL_S = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(checkout: Path, folder: Path, name: str, steps: int, limit_s: float) -> dict[str, float]:
    """Return milliseconds of processor time a step, by role, of one run of a checkout."""
    command = [sys.executable, "-m", "penstock.services.cli", "up", "config/arithmetic.toml"]
    command += [f"--run.steps={steps + 1}", f"--run.id={name}", f"--run.folder={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            began, first = _at_step(process, folder / name, _FIRST_STEP, limit_s)
            ended, last = _at_step(process, folder / name, steps, limit_s)
        finally:
            end(process, 30.0, 10.0)
    return {role: round((ended[role] - began[role]) / (last - first) * 1e3, 1) for role in ended}


def _at_step(process: subprocess.Popen[bytes], run: Path, step: int, limit_s: float) -> tuple[dict[str, float], int]:
    """Return the processor time of each role once ``step`` is made, and the newest step."""
    until_s = time.monotonic() + limit_s
    while (made := len(steps_of(run))) < step:
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"expected step {step} of {run.name} within {limit_s:.0f} s, found {made}\n{logs_of(run)}")
        time.sleep(_POLL_S)
    return _spent_s(process.pid), made


def _spent_s(parent: int) -> dict[str, float]:
    spent: dict[str, float] = {}
    for pid in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        module = next((word for word in words if word.startswith("penstock.services.")), "")
        role = module.removeprefix("penstock.services.") or Path(words[0].split()[0]).name
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        spent[role] = spent.get(role, 0.0) + (int(user) + int(system)) / _TICKS
    return {**spent, "all": sum(spent.values())}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder of another checkout")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=600.0)
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.resolve(), "after": ROOT}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    loads = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for number in range(arguments.rounds):
            for name, checkout in checkouts.items():
                loads.append(round(os.getloadavg()[0], 1))
                runs[name].append(
                    measure(checkout, Path(folder), f"{name}-{number}", arguments.steps, arguments.limit_s)
                )
                print(name, runs[name][-1], file=sys.stderr, flush=True)
    medians: dict[str, Any] = {
        name: {role: round(statistics.median(run.get(role, 0.0) for run in of), 1) for role in of[0]}
        for name, of in runs.items()
    }
    pairs = zip(runs["before"], runs["after"], strict=True)
    ratios: dict[str, list[float]] = {role: [] for role in runs["before"][0]}
    for before, after in pairs:
        for role, values in ratios.items():
            values.append(round(after.get(role, 0.0) / max(before[role], 1e-9), 3))
    print(json.dumps({"milliseconds": medians, "ratio": ratios, "steps": arguments.steps, "loads": loads}))


if __name__ == "__main__":
    main()
