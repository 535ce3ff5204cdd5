"""Growth of every process of a run on this machine: unique memory (USS) per 1,000 steps, after the first third.

Starts the arithmetic example with ``penstock up`` (no GPU), looks at all its processes every few seconds, and stops it
in order. The slope is that of a line fitted to the looks after the first third of the steps, for processes that lived
through them; files grow by what they gained in the same time.

    python -m benchmarks.soak --seconds 1200
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

_LOOK_S = 5.0
_STOP_S = 120.0
_FLAGS = {
    "run.steps": 1_000_000,
    "sampling.group_size": 4,
    "algorithm.groups_per_step": 4,
    "evaluation.every_steps": 50,
    "evaluation.problems": 8,
    "trainer.checkpoint_every_steps": 50,
    "trainer.keep_last": 2,
}


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200.0, help="of the run, once it trains")
    parser.add_argument("--config", type=Path, default=Path("config/arithmetic.toml"))
    parser.add_argument("--folder", type=Path, default=None, help="keep the run here; default: it is removed")
    parser.add_argument("flags", nargs="*", help="more settings: run.seed=3 …")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = arguments.folder or Path(scratch)
        values = {**_FLAGS, **dict(flag.split("=", 1) for flag in arguments.flags)}
        looks, files = soak(arguments.config, folder, values, arguments.seconds)
    first, last = looks[0], looks[-1]
    result = {
        "benchmark": "soak",
        "seconds": round(last["at_s"] - first["at_s"]),
        "steps": last["step"] - first["step"],
        "processes": growth(looks),
        "files_bytes_a_step": files,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps(result))


def soak(
    config: Path, folder: Path, values: dict[str, Any], seconds: float
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run for ``seconds`` after the first step; return the looks, and what each file gained a step."""
    flags = [f"--{name}={value}" for name, value in {**values, "run.folder": folder, "run.id": "soak"}.items()]
    command = [sys.executable, "-m", "penstock.services.cli", "up", str(config), *flags]
    run, looks, sizes = folder / "soak", list[dict[str, Any]](), list[dict[str, int]]()
    with (folder / "up.txt").open("w") as output:
        up = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        while up.poll() is None and not (looks and looks[-1]["at_s"] - looks[0]["at_s"] >= seconds):
            time.sleep(_LOOK_S)
            if step := steps_of(run):
                looks.append({"at_s": time.time(), "step": step, "uss": memory_of(run)})
                sizes.append({str(file.relative_to(run)): file.stat().st_size for file in records_of(run)})
                print(json.dumps(looks[-1]), file=sys.stderr, flush=True)
    finally:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            up.kill()
    if len(looks) < 6:
        raise SystemExit(f"the run made no steps: see {folder / 'up.txt'}, or keep it with --folder")
    steps = max(1, looks[-1]["step"] - looks[0]["step"])
    gained = {name: (size - sizes[0].get(name, 0)) / steps for name, size in sizes[-1].items()}
    return looks, {name: round(nbytes) for name, nbytes in sorted(gained.items()) if nbytes >= 1}


def steps_of(run: Path) -> int:
    """Return the newest recorded step, or 0."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, ValueError, LookupError):
        return 0


def memory_of(run: Path) -> dict[str, int]:
    """Return each live process's unique bytes, by name and id: a process started again is another."""
    memory = {}
    try:
        rows = json.loads((run / "up.json").read_text(encoding="utf-8"))["processes"]
    except (OSError, ValueError):
        return {}
    for row in rows:
        try:
            process = psutil.Process(row["pid"])
            for number, each in enumerate((process, *process.children(recursive=True))):
                name = row["name"] if not number else f"{row['name']} child {each.name()}"
                memory[f"{name} ({each.pid})"] = int(each.memory_full_info().uss)
        except (psutil.Error, TypeError, ValueError):
            continue
    return memory


def records_of(run: Path) -> list[Path]:
    return [file for pattern in ("*.jsonl", "logs/*") for file in run.glob(pattern) if file.is_file()]


def growth(looks: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the slope of each process that lived through the last two thirds of the steps.

    >>> looks = [{"step": step, "uss": {"a": step * 2**20}} for step in range(0, 100, 10)]
    >>> growth(looks)["a"]["mib_per_1000_steps"]
    1000.0
    """
    first, last = looks[0]["step"], looks[-1]["step"]
    late = [look for look in looks if look["step"] >= first + (last - first) / 3]
    names = set.intersection(*(set(look["uss"]) for look in late))
    grown = {}
    for name in sorted(names):
        mebibytes = np.array([look["uss"][name] / 2**20 for look in late])
        slope = np.polyfit([look["step"] for look in late], mebibytes, 1)[0]
        grown[name] = {
            "mib": round(float(mebibytes[-1]), 1),
            "mib_per_1000_steps": round(1000 * float(slope), 2),
        }
    return grown


if __name__ == "__main__":
    main()
