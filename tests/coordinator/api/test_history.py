"""Laws of the API over a long history: an answer costs what it holds, and its pages are the whole history."""

import dataclasses
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.bus import api_history
from penstock.services.coordinator.api.app import make_app
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import RUN
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion, Probe
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.policy.policies import POLICIES, REVOKED
from tests.support.coordinator_players import make, record, settings

VERSIONS = 1200


async def pages(http: httpx.AsyncClient, query: str) -> list[int]:
    versions: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await http.get(f"/v1/policies?{query}" + (f"&cursor={cursor}" if cursor else ""))).json()
        versions += [view["version"] for view in page["items"]]
        cursor = page["next"]
    return versions


async def test_every_version_is_on_one_page_and_records_are_read_once(
    bus: Bus, tmp_path: Path, monkeypatch: Any
) -> None:
    ledger, decoded = Ledger(bus), 0
    await ledger.create()
    await api_history.write_history(bus, VERSIONS)
    await bus.write(POLICIES, "HDEL", *range(300, 400))  # numbers of a lost bus
    parts = make(bus, settings(tmp_path, coordinator={"autostart": False}))
    known = [*range(300), *range(400, VERSIONS)]
    original = wire.decode

    def decode(data: bytes, kind: Any) -> Any:
        nonlocal decoded
        decoded += kind is PolicyRecord
        return original(data, kind)

    monkeypatch.setattr(wire, "decode", decode)
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert await pages(http, "limit=50") == known
        assert decoded <= 1.1 * len(known), "each page decodes its own records, and one to see whether more follow"
        assert await pages(http, "state=live") == [VERSIONS - 1]
        assert await pages(http, "state=retired&limit=500") == known[:-1]
        assert await pages(http, "state=revoked") == await pages(http, "state=published") == []
        decoded = 0
        view = (await http.get("/v1/policies/1180")).json()
        assert (view["state"], view["evaluations"][0]["accuracy"], view["metrics"]["metric_7"]) == ("retired", 0.6, 1.0)
        compared = (await http.get("/v1/policies/40/compare/1100")).json()
        assert (compared["ancestor"], compared["left_steps"], compared["right_steps"]) == (40, 0, 1060)
        assert decoded < 10


async def test_versions_of_an_abandoned_branch_are_compared_by_their_lineage(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    family = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: 5}  # rolled back to 1 after 3, and to 5 would leave 6
    for version, parent in family.items():
        await ledger.restore_policy(record(version, parent, version), 0, 0)
    await bus.write(RUN, "HSET", "newest_version", 6)
    for version in (2, 3):
        await bus.write(REVOKED, "SADD", str(version))
    parts = make(bus, settings(tmp_path, coordinator={"autostart": False}))
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for version, other, ancestor in ((3, 6, 1), (6, 3, 1), (2, 3, 2), (4, 6, 4), (3, 3, 3), (0, 3, 0)):
            assert (await http.get(f"/v1/policies/{version}/compare/{other}")).json()["ancestor"] == ancestor
        assert await pages(http, "state=revoked&limit=1") == [2, 3]


async def test_probes_of_old_versions_leave_the_bus(bus: Bus) -> None:
    ledger = Ledger(bus)
    numbers, logprobs = np.arange(4, dtype=np.int32), np.zeros(3, np.float32)
    probe = Probe(numbers, np.array([4], np.int32), logprobs, noise=logprobs)
    for version in range(0, 120, 10):
        await ledger.restore_policy(dataclasses.replace(record(version, None, version), probe=probe), 0, 0)
    for live in range(100, 120):
        await ledger.drop_probe(PolicyVersion(live))
    left = [int(each.version) for each in await ledger.policies() if each.probe is not None]
    assert left == list(range(20, 120, 10))
    assert [int(each.version) for each in await ledger.policies(after=50)] == list(range(60, 120, 10))
