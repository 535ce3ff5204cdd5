"""Effect of 1,000 requests a second of GET /v1/run on admission.

A coordinator on one core keeps slots filled, which this process empties, with and without a client on another core.
``admission_ratio``: median of groups admitted under load / without; ``refill_ms``: time to refill a slot.

    python -m benchmarks.bus.status --requests-per-s 1000 --seconds 5 --rounds 3
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.shared.bus import embedded, streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion, Prompt
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.settings import Settings, dump

GROUPS_PER_S, CONNECTIONS, SLOTS = 400, 32, 64


async def load(url: str, requests_per_s: float, seconds: float) -> int:
    """Send requests at a rate; return the number of answers."""
    parts = urlsplit(url)
    request = f"GET /v1/run HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    end_s, answered = time.monotonic() + seconds, 0

    async def ask(number: int) -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        each_s, due_s = CONNECTIONS / requests_per_s, time.monotonic() + number / requests_per_s
        while time.monotonic() < end_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            due_s += each_s
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            answered += 1
        writer.close()

    await asyncio.gather(*(ask(number) for number in range(CONNECTIONS)))
    return answered


async def empty_slots(bus: Bus, seconds: float) -> tuple[float, list[float]]:
    """Empty slots at a steady rate; return groups per second and refill times (ms)."""
    taken, refills, end_s, due_s = 0, [], time.monotonic() + seconds, time.monotonic()
    batch = GROUPS_PER_S // 50
    while time.monotonic() < end_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        due_s += batch / GROUPS_PER_S
        for delivery in await bus.read(streams.PROMPTS, Prompt, "benchmark", batch, None):
            await bus.drop(delivery, "benchmark")
            taken += 1
        emptied_s = time.perf_counter()
        while await bus.length(streams.PROMPTS) < SLOTS and time.monotonic() < end_s:
            await asyncio.sleep(0.001)
        refills.append((time.perf_counter() - emptied_s) * 1e3)
    return taken / seconds, refills


async def measure(url: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a coordinator whose run never trains."""
    bus = await Bus.connect(url, "status", wait_s=10.0)
    coordinator = subprocess.Popen(
        [sys.executable, "-m", "penstock.services.coordinator", "--config", str(write(folder, url))]
    )
    os.sched_setaffinity(coordinator.pid, {min(os.sched_getaffinity(0))})
    try:
        announced = folder / "runs" / "status" / "coordinator.json"
        while not announced.exists():
            await asyncio.sleep(0.05)
        ledger = Ledger(bus)
        first = PolicyRecord(PolicyVersion(0), None, 0, time.time(), "ab" * 32, "/none")
        await ledger.commit(await ledger.take_epoch(), first, [], None)
        while await bus.length(streams.PROMPTS) < SLOTS:
            await asyncio.sleep(0.05)
        return await rounds(bus, json.loads(announced.read_text())["url"], arguments)
    finally:
        coordinator.terminate()
        coordinator.wait()
        await bus.close()


async def rounds(bus: Bus, api: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result of alternate rounds."""
    quiet: list[float] = []
    loaded: list[float] = []
    answered: list[float] = []
    refills: dict[str, list[float]] = {"quiet": [], "loaded": []}
    for _ in range(arguments.rounds):
        rate, refilled = await empty_slots(bus, arguments.seconds)
        quiet.append(rate)
        refills["quiet"] += refilled
        command = [sys.executable, "-m", "benchmarks.bus.status", "--load", api, "--seconds", str(arguments.seconds)]
        asking = await asyncio.create_subprocess_exec(
            *command, "--requests-per-s", str(arguments.requests_per_s), stdout=subprocess.PIPE
        )
        assert asking.stdout is not None
        await asking.stdout.readline()
        rate, refilled = await empty_slots(bus, arguments.seconds)
        loaded.append(rate)
        refills["loaded"] += refilled
        output, _ = await asking.communicate()
        answered.append(int(output) / arguments.seconds)
    return {
        "requests_per_s": round(statistics.median(answered), 1),
        "admission_ratio": round(statistics.median(b / a for a, b in zip(quiet, loaded, strict=True)), 3),
        "groups_per_s": round(statistics.median(quiet), 1),
        "groups_per_s_under_load": round(statistics.median(loaded), 1),
        "refill_ms": round(statistics.median(refills["quiet"]), 2),
        "refill_ms_under_load": round(statistics.median(refills["loaded"]), 2),
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "server": bus.server,
    }


def write(folder: Path, url: str) -> Path:
    """Write the run's settings; return the file."""
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    run = Settings.model_validate(
        {
            "run": {"id": "status", "folder": folder / "runs", "steps": 1_000_000},
            "bus": {"url": url},
            "data": {"path": folder / "train.jsonl"},
            "algorithm": {"groups_per_step": SLOTS, "max_lag": 0},
        }
    )
    dump(run, folder / "run.toml")
    return folder / "run.toml"


def main() -> None:
    """Start Valkey, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests-per-s", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each half of a round takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print("asking", flush=True)
        print(asyncio.run(load(arguments.load, arguments.requests_per_s, arguments.seconds)))
        return
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        embedded.serving(Path(folder) / "valkey") as url,
    ):
        print(json.dumps(asyncio.run(measure(url, Path(folder), arguments))))


if __name__ == "__main__":
    main()
