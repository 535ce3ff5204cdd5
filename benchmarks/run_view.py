"""Processor time of ``GET /v1/run`` by the number of evaluated versions, without its cache: against a real server.

python -m benchmarks.run_view --versions 0 100 727 5000
"""

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import tempfile
import time
from pathlib import Path

from penstock.services.coordinator.evaluation.results import Evaluation
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.evaluations import EVALUATIONS
from penstock.shared.bus.stores.policy.ledger import Ledger
from tests.chaos.run import TcpServer
from tests.support.coordinator_players import make, settings
from tests.support.raw_redis import raw

_LOOKS = 30


def main() -> None:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--versions", type=int, nargs="+", default=[0, 100, 727, 5000])
    arguments = parser.parse_args()
    cpu_ms = {str(count): round(asyncio.run(measure(count)), 2) for count in arguments.versions}
    print(
        json.dumps(
            {
                "benchmark": "run_view",
                "cpu_ms_a_look": cpu_ms,
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
            }
        )
    )


async def measure(versions: int) -> float:
    """Return the milliseconds of processor time that one look at a run takes."""
    with tempfile.TemporaryDirectory(prefix="run-view-") as scratch:
        folder = Path(scratch)
        (folder / "valkey").mkdir()
        server = TcpServer(folder / "valkey")
        server.start()
        bus = await Bus.connect(server.url, "test", wait_s=30.0)
        try:
            await Ledger(bus).create()
            for version in range(versions):
                await raw(bus).hset(bus.keys.of(EVALUATIONS), str(version), json.dumps([_evaluation(version)]))
            monitor = make(bus, settings(folder)).monitor
            await monitor.text()
            began_s = time.process_time()
            for _ in range(_LOOKS):
                monitor.forget()
                await monitor.text()
            return 1000 * (time.process_time() - began_s) / _LOOKS
        finally:
            await bus.close()
            server.kill()


def _evaluation(version: int) -> dict[str, object]:
    accuracy = {"value": 0.4, "low": 0.35, "high": 0.45}
    evaluation = Evaluation(
        version=PolicyVersion(version), step=version, set="heldout", problems=500, samples=4, answered=500, correct=800,
        accuracy=0.4, accuracy_low=0.35, accuracy_high=0.45, pass_at={}, initial=version == 0, final=False,
        started_at_s=1.0, seconds=2.0, note="",
    )  # fmt: skip
    return {**dataclasses.asdict(evaluation), "pass_at": {"4": accuracy}}


if __name__ == "__main__":
    main()
