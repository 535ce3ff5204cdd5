"""Answers of the coordinator's API to its operator and to liveness probes during a flood without token.

Threads of another process send requests that do not end, and reopen each connection that is closed. ``answered``:
shares of the operator's requests (token, a new connection each) and of ``GET /healthz`` with the expected status.

    python -m benchmarks.bus.api_flood --threads 300 --seconds 30
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.bus.status import write
from penstock.shared.bus import embedded

TOKEN = "an operator's token of a benchmark"


def attack(url: str, threads: int, seconds: float) -> int:
    """Flood ``url``; return the number of connections."""
    parts = urlsplit(url)
    end_s, opened = time.monotonic() + seconds, [0] * threads

    def reopen(number: int) -> None:
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), 5) as connection:
                opened[number] += 1
                connection.settimeout(max(0.1, end_s - time.monotonic()))
                connection.sendall(b"GET /v1/run HTTP/1.1\r\nHost: loc")
                connection.recv(1)

    attackers = [threading.Thread(target=reopen, args=(number,)) for number in range(threads)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()
    return sum(opened)


async def ask(url: str, path: str, flood: asyncio.subprocess.Process) -> dict[str, Any]:
    """Send ten requests a second until the flood ends."""
    statuses: list[int | str] = []
    times_s: list[float] = []
    while flood.returncode is None:
        sent_s = time.perf_counter()
        try:
            async with httpx.AsyncClient(timeout=60.0) as client:
                answer = await client.get(url + path, headers={"Authorization": f"Bearer {TOKEN}"})
            statuses.append(answer.status_code)
        except httpx.HTTPError as error:
            statuses.append(type(error).__name__)
        times_s.append(time.perf_counter() - sent_s)
        await asyncio.sleep(0.1)
    return {
        "requests": len(statuses),
        "answered": statuses.count(200) / len(statuses),
        "others": sorted({str(status) for status in statuses if status != 200}),
        "median_ms": round(statistics.median(times_s) * 1e3, 1),
        "slowest_ms": round(max(times_s) * 1e3, 1),
    }


async def measure(url: str, threads: int, seconds: float) -> dict[str, Any]:
    """Return what the operator and the probes got during a flood of ``url``."""
    flood = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.bus.api_flood", "--attack", url),
        *("--threads", str(threads), "--seconds", str(seconds)),
        stdout=subprocess.PIPE,
    )
    assert flood.stdout is not None
    await flood.stdout.readline()
    asked = asyncio.gather(ask(url, "/v1/run", flood), ask(url, "/healthz", flood))
    connections, _ = await flood.communicate()
    operator, liveness = await asked
    return {"operator": operator, "liveness": liveness, "hostile_connections": int(connections)}


def serve(folder: Path, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a coordinator with a token."""
    config = write(folder, url)
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    environment = {**os.environ, "PENSTOCK__COORDINATOR__TOKEN_FILE": str(folder / "token")}
    command = [sys.executable, "-m", "penstock.services.coordinator", "--config", str(config)]
    coordinator = subprocess.Popen(command, env=environment)
    try:
        announced = folder / "runs" / "status" / "coordinator.json"
        while not announced.exists():
            time.sleep(0.05)
        api = json.loads(announced.read_text())["url"]
        result = asyncio.run(measure(api, arguments.threads, arguments.seconds))
    finally:
        coordinator.terminate()
        coordinator.wait()
    return {**result, "threads": arguments.threads, "seconds": arguments.seconds}


def main() -> None:
    """Start Valkey and a coordinator, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        print("attacking", flush=True)
        print(attack(arguments.attack, arguments.threads, arguments.seconds))
        return
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        embedded.serving(Path(folder) / "valkey") as url,
    ):
        print(json.dumps(serve(Path(folder), url, arguments)))


if __name__ == "__main__":
    main()
