"""Whether the policy of examples/guess learns, from random weights: the share of episodes that guess their number.

    python examples/guess/make.py && python -m benchmarks.guess [RUN_FOLDER]

It starts the example's run, or reads one that has ended. Halving what is left solves all 15 numbers in four turns; without
hints used, four different guesses solve 27 %. The last line is one JSON object.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WINDOW = 10
"""Steps of a mean."""


def run(folder: Path) -> Path:
    command = ("up", "examples/guess/run.toml", "--run.folder", str(folder), "--run.id", "guess")
    subprocess.run(
        [sys.executable, "-m", "penstock.services.cli", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return folder / "guess"


def read(folder: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    solved = [step["reward_mean"] for step in steps]
    means = [sum(solved[start : start + WINDOW]) / WINDOW for start in range(0, len(solved) - WINDOW + 1, WINDOW)]
    return {
        "benchmark": "guess",
        "steps": len(solved),
        "episodes_per_step": round(steps[-1]["samples"]),
        "solved_first_steps": round(means[0], 3),
        "solved_last_steps": round(means[-1], 3),
        "solved_each_10_steps": [round(mean, 3) for mean in means],
        "logprob_gap_nats": steps[-1]["logprob_gap"],
        "kl_max_nats": max(step["kl_max"] for step in steps),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(read(Path(sys.argv[1]) if len(sys.argv) > 1 else run(Path(folder)))))


if __name__ == "__main__":
    main()
