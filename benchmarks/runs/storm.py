"""Recovery from a seeded storm of kills, freezes, cuts, joins, leaves, pauses and rollbacks.

The audited storm of ``tests/chaos`` (needs the extra ``dev``). Recovery is the time from a fault's start (a pause's
end) to the next commit.

    python -m benchmarks.runs.storm --seconds 150 --seed 6
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path

from tests.chaos.storm import storm


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--shared", action="store_true", help="trainer and replica use one device in turn")
    parser.add_argument("--episodes", action="store_true", help="an agent plays episodes")
    parser.add_argument("--forked", action="store_true", help="processes that start in less time than a user's")
    parser.add_argument("--folder", type=Path, default=None, help="keep the run here; default: it is removed")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="storm-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        figures = asyncio.run(
            storm(
                folder,
                arguments.seed,
                seconds=arguments.seconds,
                shared=arguments.shared,
                with_episodes=arguments.episodes,
                forked=arguments.forked,
            )
        )
    print(json.dumps({"benchmark": "storm", "cpus": os.cpu_count(), **dataclasses.asdict(figures)}))


if __name__ == "__main__":
    main()
