"""Cost of lag and benefit of a correction, on the arithmetic example.

    python -m benchmarks.staleness --lags 0,1,4,8 --steps 300

Corrected: ``--preset`` (default ``tis``). Uncorrected: the same with ``correction = "ignored"``. Prints a Markdown
table row per run, with the measured lag beside ``max_lag``, then one JSON object.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learning import Learned, learn

LEARNING_RATE = 2e-4
"""Half the example's, for every lag: larger steps change the policy too much."""


def run(folder: Path, preset: str, lag: int, corrected: bool, steps: int, learning_rate: float) -> Learned:
    """Run one lag."""
    algorithm: dict[str, Any] = {"preset": preset, "max_lag": lag}
    if not corrected:
        algorithm |= {"correction": "ignored"}
    return learn(folder, name(lag, corrected), algorithm, {"trainer": {"learning_rate": learning_rate}}, steps)


def name(lag: int, corrected: bool) -> str:
    """Return the run's name."""
    return f"lag-{lag}-{'corrected' if corrected else 'uncorrected'}"


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", default="0,1,4,8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--preset", default="tis")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    arguments = parser.parse_args()
    results: dict[str, Learned] = {}
    print("| max_lag | corrected | mean lag | accuracy before | after | KL | ESS |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="penstock-staleness-") as folder:
        for lag in (int(word) for word in arguments.lags.split(",")):
            for corrected in (True, False):
                learned = run(Path(folder), arguments.preset, lag, corrected, arguments.steps, arguments.learning_rate)
                results[name(lag, corrected)] = learned
                print(_row(lag, corrected, learned), flush=True)
    best = results[name(min(int(word) for word in arguments.lags.split(",")), True)].accuracy_after
    losses = {run_name: round(best - learned.accuracy_after, 4) for run_name, learned in results.items()}
    runs = {run_name: dataclasses.asdict(learned) for run_name, learned in results.items()}
    print(json.dumps({"preset": arguments.preset, "points_behind": losses, "runs": runs}))


def _row(lag: int, corrected: bool, learned: Learned) -> str:
    figures = learned.figures
    return (
        f"| {lag} | {'yes' if corrected else 'no'} | {figures['lag_mean']:.2f} | {learned.accuracy_before:.3f} | "
        f"{learned.accuracy_after:.3f} | {figures['kl_mean']:.4f} | {figures['ess']:.3f} |"
    )


if __name__ == "__main__":
    main()
