"""Bus losses: failovers of Sentinel, and servers that come back with older or damaged data, in a whole run.

python -m benchmarks.bus.losses --kind failovers --rounds 20
python -m benchmarks.bus.losses --kind returns --rounds 20
"""

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path

from tests.chaos.rewinds import figures_of


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", choices=("failovers", "returns"), default="failovers")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bus-losses-") as folder:
        figures = figures_of(arguments.kind, Path(folder), arguments.rounds, arguments.seed)
    print(
        json.dumps({"benchmark": f"bus_losses {arguments.kind}", "cpus": os.cpu_count(), **dataclasses.asdict(figures)})
    )


if __name__ == "__main__":
    main()
