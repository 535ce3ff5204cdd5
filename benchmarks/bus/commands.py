"""Processor time of a command on the bus in this process, of redis-py's client and of Penstock's, in microseconds.

Both send the same commands to the same server, alternately; the least and the median of rounds.

    python -m benchmarks.bus.commands --rounds 40
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client.connection import open_client
from tests.support.raw_redis import redis_py

_CALLS, _TOGETHER, _LARGE = 100, 4, b"x" * 400_000

Way = Callable[[Any], Awaitable[object]]


async def _together(client: Any) -> object:
    pipeline = client.pipeline(transaction=False)
    for _ in range(_TOGETHER):
        pipeline.execute_command("GET", "key")
    return await pipeline.execute()


WAYS: dict[str, Way] = {
    "one": lambda client: client.execute_command("GET", "key"),
    f"pipeline_of_{_TOGETHER}": _together,
    "set_400_kb": lambda client: client.execute_command("SET", "large", _LARGE),
}


async def measure(url: str, rounds: int) -> dict[str, Any]:
    """Return the microseconds of each way by each client."""
    await (await Bus.connect(url, "bench", wait_s=30.0)).close()
    clients: dict[str, Any] = {"redis_py": redis_py(url), "penstock": open_client(url)}
    spent: dict[str, dict[str, list[float]]] = {name: {client: [] for client in clients} for name in WAYS}
    for number in range(rounds + 1):  # the first round warms up
        for name, way in WAYS.items():
            for client, opened in clients.items():
                await opened.execute_command("SET", "key", "value")
                started_s = time.process_time()
                for _ in range(_CALLS):
                    await way(opened)
                if number:
                    spent[name][client].append((time.process_time() - started_s) / _CALLS * 1e6)
    for opened in clients.values():
        await opened.aclose()
    return {
        name: {
            **{f"{client}_median": round(statistics.median(of), 1) for client, of in by_client.items()},
            **{f"{client}_least": round(min(of), 1) for client, of in by_client.items()},
            "ratio": round(
                statistics.median(a / b for a, b in zip(by_client["penstock"], by_client["redis_py"], strict=True)), 3
            ),
        }
        for name, by_client in spent.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        embedded.serving(Path(folder) / "valkey") as url,
    ):
        print(json.dumps({"microseconds": asyncio.run(measure(url, arguments.rounds)), "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
