"""Step time while a tracker blocks, compared with no tracking at all, in turns within one run.

::

    blocked    the sink's process is stopped (SIGSTOP), and its service waits for its answer
    none       the tracking service and its sink are stopped: nothing of them runs

    python -m benchmarks.runs.tracking --block-s 60 --rounds 3
    python -m benchmarks.runs.tracking --block-s 10 --rounds 20    on a busy machine: load changes less within a pair

Each round is a pair of stretches, one of each case, in the run of ``config/arithmetic.toml``. Prints ``ratio``: the
geometric mean over the pairs of step time while blocked / without tracking, so that load that outlasts a pair cancels
out, with its 95 % interval (``between``, bootstrap over pairs); ``each_step_once``: whether TensorBoard has every step
once at the end.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from penstock import Run
from penstock.services.coordinator.records.jsonl import read

ROOT = Path(__file__).parents[2]
_SETTLE_S = 1.0


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run.folder": folder,
            "run.steps": 1_000_000,
            "tracking.sinks": ["tensorboard"],
            "evaluation.path": None,
        }
        with Run("config/arithmetic.toml", settings) as run:
            run.start()
            pairs = measure(run, given.block_s, given.rounds)
            run.stop("measured")
            run.wait()
        once = _steps(run.folder) == shown(run.folder)
    ratio, between = ratio_of([pair["blocked"] / pair["none"] for pair in pairs])
    result = {
        "ratio": ratio,
        "between": between,
        "step_s": {case: statistics.median(pair[case] for pair in pairs) for case in pairs[0]},
        "pairs": len(pairs),
        "block_s": given.block_s,
        "each_step_once": once,
        "load": os.getloadavg(),
    }
    print(json.dumps(result))


def ratio_of(ratios: list[float]) -> tuple[float, tuple[float, float]]:
    """Return the geometric mean and its 95 % interval."""
    logs, lot = np.log(ratios), np.random.default_rng(0)
    means = np.exp(lot.choice(logs, (10_000, len(logs))).mean(axis=1))
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return round(float(np.exp(logs.mean())), 4), (round(low, 4), round(high, 4))


def measure(run: Run, block_s: float, rounds: int) -> list[dict[str, float]]:
    """Return the mean step time of each case, by pair."""
    _wait_for_sink(run)
    pairs: list[dict[str, float]] = [{} for _ in range(rounds)]
    for number in range(2 * rounds):
        case = ("blocked", "none", "none", "blocked")[number % 4]
        service = _tracking(run)
        stopped = service.children() if case == "blocked" else [service, *service.children()]
        with _stopped(stopped):
            time.sleep(_SETTLE_S)
            since_s = time.time()
            time.sleep(block_s)
            until_s = time.time()
        ends = [line["finished_at_s"] for line in read(run.folder / "metrics.jsonl")]
        within = [float(end_s) for end_s in ends if isinstance(end_s, float) and since_s < end_s < until_s]
        if len(within) > 1:
            pairs[number // 2][case] = (within[-1] - within[0]) / (len(within) - 1)
        time.sleep(_SETTLE_S)
    return [pair for pair in pairs if len(pair) == 2]


@contextlib.contextmanager
def _stopped(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def _wait_for_sink(run: Run) -> None:
    offset = run.folder / "tracking" / "tensorboard.json"
    while not offset.exists() or not _tracking(run).children():
        time.sleep(0.2)


def _tracking(run: Run) -> psutil.Process:
    table = json.loads((run.folder / "up.json").read_text(encoding="utf-8"))
    return psutil.Process(next(row["pid"] for row in table["processes"] if row["name"] == "tracking-0"))


def _steps(folder: Path) -> list[int]:
    return [int(str(line["step"])) for line in read(folder / "metrics.jsonl")]


def shown(folder: Path) -> list[int]:
    """Return the steps in TensorBoard's file, in its order."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = (folder / "tensorboard" / folder.name).glob("*tfevents*")
    events = LegacyEventFileLoader(str(file)).Load()
    return [event.step for event in events for value in event.summary.value if value.tag == "train/reward"]


if __name__ == "__main__":
    main()
