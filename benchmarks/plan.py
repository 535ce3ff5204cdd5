"""The plan's simulation beside real runs of config/arithmetic.toml at several ``max_lag``, on this CPU.

    python -m benchmarks.plan --steps 24 --rounds 2

The rates come from the synchronous runs alone, where trainer and replicas do not disturb one another, and the
processor time that several busy processes get from a short trial. ``deviation`` compares the simulated with the
measured ratio of samples/s to the synchronous runs; the bar is 0.15. Prints one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.pipeline import run_penstock
from benchmarks.pipeline_work import arithmetic
from penstock.services.plan.measured import Measured, measured
from penstock.services.plan.rates import Rates
from penstock.services.plan.shapes import shape_of
from penstock.services.plan.simulation import Side, SimulatedFigures, simulate
from penstock.services.plan.workload import Lengths, Workload

BAR = 0.15
_BUSY = 3
"""Two replicas and the trainer."""
_TRIAL_S = 2.0
_LIMIT_S = 600.0
"""For one run."""
_FIXED = 0.3
"""Share of a decoding step that does not grow with the batch."""


def cores() -> float:
    """Return how many processors' time ``_BUSY`` processes get, in units of what one alone gets."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(_BUSY) as pool:
        pool.map(_count, [0.05] * _BUSY)
        alone = pool.map(_count, [_TRIAL_S])
        together = pool.map(_count, [_TRIAL_S] * _BUSY, chunksize=1)
    return sum(together) / alone[0]


def _count(seconds: float) -> int:
    until_s, count = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        count += 1
    return count


def simulated(settings: dict[str, Any], figures: Measured, lag: int, available: float, steps: int) -> SimulatedFigures:
    """Return the run at ``lag`` by the rates of the synchronous run."""
    groups, size = settings["algorithm"]["groups_per_step"], settings["sampling"]["group_size"]
    most, replicas = settings["sampling"]["max_new_tokens"], settings["rollout"]["replicas"]
    lengths = Lengths(figures.tokens, most, spread=0.0)
    shape = shape_of(settings["policy"]["model"])
    work = Workload(shape, 4, groups, size, 6, lengths, lag, steps, 1.0, None, False, 0)
    sequences = groups / replicas * size
    step_s = figures.generate_s / figures.tokens
    rest_s = max(0.0, figures.wait_s - figures.generate_s)
    rates = Rates(
        decode_s=_FIXED * step_s,
        sequence_s=(1 - _FIXED) * step_s / sequences,
        prefill_s=0.0,
        train_s=figures.other_s,
        token_s=figures.compute_s / work.step_tokens,
        transfer_s=0.01,
        bus_s=rest_s / groups,
    )
    side = Side(replicas, settings["rollout"]["max_groups"], cores=available, batched=True)
    return simulate(work, rates, side, steps)


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _median(runs: list[Measured]) -> Measured:
    names = Measured.__dataclass_fields__
    return Measured(**{name: statistics.median(getattr(run, name) for run in runs) for name in names})


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", default="0,1,4")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    lags = [int(word) for word in arguments.lags.split(",")]
    work, runs, trials = arithmetic(), dict[int, list[Measured]](), list[float]()
    for _ in range(arguments.rounds):
        trials.append(cores())
        for lag in lags:
            with tempfile.TemporaryDirectory(prefix="penstock-bench-plan-") as folder:
                run_penstock(Path(folder), work, arguments.steps, lag, [], _LIMIT_S)
                runs.setdefault(lag, []).append(measured(_lines(Path(folder) / f"lag-{lag}"), lag))
    print(json.dumps(_result(work.settings, runs, min(statistics.median(trials), float(_BUSY)), arguments.steps)))


def _result(
    settings: dict[str, Any], runs: dict[int, list[Measured]], available: float, steps: int
) -> dict[str, object]:
    first = min(runs)
    figures = _median(runs[first])
    outcomes = {lag: simulated(settings, figures, lag, available, steps) for lag in runs}
    real = {lag: statistics.median(run.samples_per_s for run in of_lag) for lag, of_lag in runs.items()}
    deviation = {
        lag: outcomes[lag].samples_per_s / outcomes[first].samples_per_s / (real[lag] / real[first]) - 1 for lag in runs
    }
    return {
        "samples_per_s": {lag: round(rate, 1) for lag, rate in real.items()},
        "simulated": {lag: round(outcome.samples_per_s, 1) for lag, outcome in outcomes.items()},
        "deviation": {lag: round(value, 3) for lag, value in deviation.items()},
        "bar_met": all(abs(value) <= BAR for value in deviation.values()),
        "available_cores": round(available, 2),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "rounds": len(runs[first]),
        "steps": steps,
        "waits_s": {lag: round(_median(of_lag).wait_s, 3) for lag, of_lag in runs.items()},
        "step_s": {lag: round(_median(of_lag).step_s, 3) for lag, of_lag in runs.items()},
    }


if __name__ == "__main__":
    main()
