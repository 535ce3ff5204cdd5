"""Leaders killed or frozen in the middle of something, with an audit of groups, versions, and every record of the run.

Real coordinators, tracking service and Valkey; the trainer and replicas have no model (`tests/chaos/leader.py`, which
needs the extra ``dev``). It fails at the first seed after which something is lost, or is twice.

    python -m benchmarks.bus.leader --seeds 40
"""

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.leader import strike


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    strikes, began_s = [], time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        folder = Path(tempfile.mkdtemp(prefix=f"leader-{seed}-"))  # stays where a seed fails
        strikes.append(asyncio.run(strike(folder, seed)))
        shutil.rmtree(folder)
        print(strikes[-1], file=sys.stderr, flush=True)
    result = {
        "benchmark": "leader",
        "seeds": len(strikes),
        "places": Counter(struck.place for struck in strikes),
        "killed": sum(struck.fault == "killed" for struck in strikes),
        "frozen": sum(struck.fault != "killed" for struck in strikes),
        "steps": sum(struck.steps for struck in strikes),
        "lines": sum(struck.lines for struck in strikes),
        "terms": sum(struck.terms for struck in strikes),
        "lost_or_twice": 0,
        "seconds": round(time.monotonic() - began_s),
        "cpus": os.cpu_count(),
    }
    print(json.dumps({**result, "example": dataclasses.asdict(strikes[-1])}))


if __name__ == "__main__":
    main()
