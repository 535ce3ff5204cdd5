"""Processor time of the API's answers over a long run's history.

Writes versions with their records, states, marks and evaluations to a Valkey, and a rollouts.jsonl, then asks the API
in this process. ``slowest_ms``: processor time of the slowest of each kind, client included; ``pages_s``: of reading
all versions in pages of 100, and of the first and last tenth of them.

    python -m benchmarks.bus.api_history --versions 100000
"""

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bus.status import write
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.data import load_data
from penstock.services.coordinator.service import assemble
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import RUN
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.evaluations import EVALUATIONS
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.policy.policies import CHECKPOINTS, MARKS, POLICIES, POLICY_STATES, PolicyState
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import load
from tests.support.raw_redis import raw

METRICS = {f"metric_{number}": number / 7 for number in range(60)}
EVALUATION = {
    "set": "heldout", "problems": 200, "samples": 1, "answered": 200, "correct": 120, "accuracy": 0.6,
    "accuracy_low": 0.5, "accuracy_high": 0.7, "pass_at": {"1": {"value": 0.6, "low": 0.5, "high": 0.7}},
    "initial": False, "final": False, "started_at_s": 0.0, "seconds": 9.0, "note": "", "gate": "", "gate_detail": "",
}  # fmt: skip


async def write_history(bus: Bus, versions: int) -> None:
    """Write ``versions`` versions as a run leaves them, with an evaluation and a checkpoint at every twentieth."""
    for start in range(0, versions, 1000):
        fields: dict[Any, list[Any]] = {POLICIES: [], POLICY_STATES: [], MARKS: [], EVALUATIONS: []}
        for version in range(start, min(versions, start + 1000)):
            parent = PolicyVersion(version - 1) if version else None
            record = PolicyRecord(PolicyVersion(version), parent, version, float(version), "ab" * 32, "", METRICS)
            state = PolicyState.LIVE if version == versions - 1 else PolicyState.RETIRED
            fields[POLICIES] += [version, wire.encode(record)]
            fields[POLICY_STATES] += [version, state.value]
            fields[MARKS] += [version, f"{version * 8} {version * 8}"]
            if version % 20 == 0:
                fields[EVALUATIONS] += [version, json.dumps([{**EVALUATION, "version": version, "step": version}])]
        for key, words in fields.items():
            await raw(bus).execute_command("HSET", bus.keys.of(key), *words)
    checkpoints = (word for v in range(0, versions, 2000) for word in (v, f"/step-{v}"))
    await raw(bus).execute_command("HSET", bus.keys.of(CHECKPOINTS), *checkpoints)
    newest = versions - 1
    places = dict.fromkeys(("newest_version", "tip", "head", "step"), newest)
    await raw(bus).hset(bus.keys.of(RUN), mapping=places)


def write_rollouts(file: Path, groups: int) -> None:
    """Write one group of 4 completions a line."""
    completion = {"text": "word " * 200, "reward": 1.0, "scores": {}, "tokens": 200, "finish_reason": "stop"}
    completions = [{**completion, "versions": [1]} for _ in range(4)]
    with file.open("w") as lines:
        for number in range(1, groups + 1):
            line = {"entry": f"{number}-0", "step": number, "group": number, "problem": "a:1", "row_id": "a"}
            lines.write(
                json.dumps(
                    {**line, "prompt": "1+1=", "answer": "2", "replica": "rollout-0", "completions": completions}
                )
                + "\n"
            )


class Client:
    """Asks the API in this process, and counts processor time by kind of request."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.seconds: dict[str, list[float]] = {}

    async def get(self, kind: str, path: str) -> Any:
        since_s = time.process_time()
        answer = await self._http.get(path)
        self.seconds.setdefault(kind, []).append(time.process_time() - since_s)
        answer.raise_for_status()
        return answer.json()


async def ask(client: Client, versions: int) -> dict[str, Any]:
    """Ask for all kinds of answers, then for all versions in pages."""
    choose = random.Random(0)
    for _ in range(20):
        version, other = choose.randrange(versions), choose.randrange(versions)
        await client.get("version", f"/v1/policies/{version}")
        await client.get("compare", f"/v1/policies/{version}/compare/{other}")
        await client.get("page of 100", f"/v1/policies?cursor={version}")
        await client.get("page of 500", f"/v1/policies?limit=500&cursor={version}")
        await client.get("live", "/v1/policies?state=live")
        await client.get("run", "/v1/run")
        await asyncio.sleep(0.15)  # the view is kept for 100 ms
        groups = await client.get(
            "rollouts", f"/v1/run/rollouts?limit=50&cursor={choose.randrange(51, versions // 10)}-0"
        )
        assert len(groups["items"]) == 50
    pages: list[float] = []
    cursor: str | None = "-1"
    count = 0
    while cursor is not None:
        page = await client.get("all pages", "/v1/policies" + (f"?cursor={cursor}" if cursor != "-1" else ""))
        cursor, count = page["next"], count + len(page["items"])
        pages.append(client.seconds["all pages"][-1])
    assert count == versions, count
    tenth = len(pages) // 10
    return {
        "pages": len(pages),
        "pages_s": round(sum(pages), 2),
        "first_tenth_s": round(sum(pages[:tenth]), 2),
        "last_tenth_s": round(sum(pages[-tenth:]), 2),
        "slowest_ms": {kind: round(max(seconds) * 1e3, 1) for kind, seconds in client.seconds.items()},
        "median_ms": {kind: round(sorted(s)[len(s) // 2] * 1e3, 1) for kind, s in client.seconds.items()},
    }


async def measure(url: str, folder: Path, versions: int) -> dict[str, Any]:
    """Write a history and ask for it."""
    settings = load(write(folder, url), environment={})
    settings.run_folder.mkdir(parents=True)
    bus = await Bus.connect(url, "status", wait_s=10.0)
    await Ledger(bus).create()
    await write_history(bus, versions)
    await asyncio.to_thread(write_rollouts, settings.run_folder / "rollouts.jsonl", versions // 10)
    parts = assemble(bus, Live(bus, settings), load_data(settings), settings.run_folder, Status(state="working"))
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60.0) as http:
        await http.get("/v1/run")  # reads the evaluations once
        gc.freeze()  # else a full collection of modules counts for one request
        result = await ask(Client(http), versions)
    bytes_each = {
        key.name: int(await raw(bus).execute_command("MEMORY", "USAGE", bus.keys.of(key))) // versions
        for key in (POLICIES, POLICY_STATES, MARKS)
    }
    await bus.close()
    return {"versions": versions, **result, "bus_bytes_a_version": bytes_each}


def main() -> None:
    """Start Valkey, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=100_000)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        embedded.serving(Path(folder) / "valkey") as url,
    ):
        print(json.dumps(asyncio.run(measure(url, Path(folder), arguments.versions))))


if __name__ == "__main__":
    main()
