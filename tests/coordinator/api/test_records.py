"""Laws of step reports and groups."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.api.routes import records as routes
from penstock.services.coordinator.records.jsonl import newest_first
from penstock.services.coordinator.service import Coordinator
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import PAYLOADS
from penstock.shared.bus.stores.policy.ledger import Ledger
from tests.support import builders
from tests.support.coordinator_players import make, report, settings
from tests.support.raw_redis import raw


@pytest.fixture
async def parts(bus: Bus, tmp_path: Path) -> Coordinator:
    await Ledger(bus).create()
    return make(bus, settings(tmp_path))


@pytest.fixture
async def http(parts: Coordinator) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_steps_are_told_newest_first_page_by_page(http: httpx.AsyncClient, bus: Bus) -> None:
    for step in (1, 2, 3):
        await bus.publish(streams.STEPS, report(step, step))
    first = (await http.get("/v1/run/steps?limit=2")).json()
    rest = (await http.get(f"/v1/run/steps?limit=2&cursor={first['next']}")).json()
    assert [[item["step"] for item in page["items"]] for page in (first, rest)] == [[3, 2], [1]]
    assert rest["next"] is None
    newest = first["items"][0]
    assert (newest["version"], newest["samples"], newest["lag_counts"]) == (3, 4, {"0": 3, "1": 1})
    assert (newest["metrics"]["reward_mean"], newest["metrics"]["kl_max"]) == (0.3, None)  # not a number: null


async def journal(bus: Bus, step: int) -> None:
    await bus.append(streams.JOURNAL, {"step": str(step), "data": wire.encode(builders.experience(step))})


async def test_groups_are_read_from_the_journal_and_before_it_from_the_records(
    http: httpx.AsyncClient, bus: Bus, parts: Coordinator
) -> None:
    for step in (1, 2, 3):
        await journal(bus, step)
    whole = (await http.get("/v1/run/rollouts")).json()["items"]
    assert [completion["step"] for completion in whole] == [3, 2, 1]
    completions = [(completion["text"], completion["reward"]) for completion in whole[0]["completions"]]
    assert completions == [("46", 1.0), ("47", 0.0)]
    # a checkpoint trims the journal; the records keep some of it
    kept = [{**completion, "entry": completion["id"]} for completion in reversed(whole)]
    file = parts.api.folder / "rollouts.jsonl"
    other = '{"entry": "1-0", "kept": "by a version to come"}\n'
    file.write_text(other + "".join(json.dumps(completion) + "\n" for completion in kept), encoding="utf-8")
    await raw(bus).xtrim(bus.keys.of(streams.JOURNAL), maxlen=1, approximate=False)
    assert (await http.get("/v1/run/rollouts")).json()["items"] == whole
    first = (await http.get("/v1/run/rollouts?limit=2")).json()
    assert [completion["step"] for completion in first["items"]] == [3, 2]
    rest = (await http.get(f"/v1/run/rollouts?limit=2&cursor={first['next']}")).json()
    assert ([completion["step"] for completion in rest["items"]], rest["next"]) == ([1], None)


async def test_groups_of_the_journal_that_cannot_be_decoded_are_read_from_the_records(
    http: httpx.AsyncClient, bus: Bus, parts: Coordinator
) -> None:
    await bus.append(streams.JOURNAL, {"step": "1", "data": b"of a release to come"})
    for step in (2, 3):
        await journal(bus, step)
    whole = (await http.get("/v1/run/rollouts")).json()["items"]
    assert [group["step"] for group in whole] == [3, 2]
    kept = "".join(json.dumps({**group, "entry": group["id"]}) + "\n" for group in reversed(whole))
    (parts.api.folder / "rollouts.jsonl").write_text(kept, encoding="utf-8")
    await raw(bus).xdel(bus.keys.of(streams.JOURNAL), *(group["id"] for group in whole))
    assert (await http.get("/v1/run/rollouts")).json()["items"] == whole


async def test_groups_are_found_by_a_text_or_by_their_problem_over_all_steps(
    http: httpx.AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, (group_id, text) in enumerate([(7, "Sum"), (8, "other"), (7, "sums"), (8, "sum")], 1):
        made = builders.experience(group_id)
        prompt = dataclasses.replace(made.group.prompt, text=text)
        experience = dataclasses.replace(made, group=dataclasses.replace(made.group, prompt=prompt))
        await bus.append(streams.JOURNAL, {"step": str(step), "data": wire.encode(experience)})

    async def search(query: str) -> tuple[list[int], bool]:
        page = (await http.get(f"/v1/run/rollouts?{query}")).json()
        return [item["step"] for item in page["items"]], page["next"] is None

    assert await search("search=SUM") == ([4, 3, 1], True)
    assert await search("search=47&problem=train.jsonl:8") == ([3, 1], True)
    assert await search("problem=train.jsonl:7") == ([], True)
    first = (await http.get("/v1/run/rollouts?search=sum&limit=2")).json()
    assert await search(f"search=sum&cursor={first['next']}") == ([1], True)
    monkeypatch.setattr(routes, "_SEARCHED", 2)
    monkeypatch.setattr(routes, "_AT_ONCE", 2)
    assert await search("problem=train.jsonl:7") == ([], False), "a request examines a part; `next` continues"


async def test_groups_up_to_a_step_are_found_without_the_payloads_of_later_ones(
    http: httpx.AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 8):
        await bus.append(streams.JOURNAL, {"step": str(step), "entry": f"1-{step}"})
        payload = wire.encode(builders.experience(step))
        await bus.write(PAYLOADS, "HSET", f"experience:1-{step}", payload)
    read: list[bytes] = []

    async def whole(data: bytes) -> bytes:
        read.append(data)
        return data

    monkeypatch.setattr(bus, "whole", whole)
    page = (await http.get("/v1/run/rollouts?step=2&limit=1")).json()
    assert [(item["step"], item["group"]) for item in page["items"]] == [(2, 2)]
    assert len(read) == 2, "its own, and one to know whether there are more"


async def test_a_run_that_trained_nothing_has_no_groups(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/run/rollouts")).json() == {"items": [], "next": None}


def test_lines_are_read_from_the_end_whatever_their_length_and_a_torn_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    long = "x" * 200_000  # longer than one read
    whole = "".join(json.dumps({"n": n, "text": long if n == 2 else ""}) + "\n" for n in (1, 2, 3))
    file.write_text(whole + '{"n": 4, "te', encoding="utf-8")
    assert [(line["n"], len(str(line["text"]))) for line in newest_first(file)] == [(3, 0), (2, 200_000), (1, 0)]
    assert list(newest_first(tmp_path / "none")) == []


async def test_a_page_of_long_groups_has_fewer_of_them_wherever_they_are(
    http: httpx.AsyncClient, bus: Bus, parts: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 8):
        await journal(bus, step)  # of 4 characters
    whole = (await http.get("/v1/run/rollouts?limit=50")).json()["items"]
    monkeypatch.setattr(routes, "_MOST_CHARACTERS", 8)

    async def pages(query: str = "") -> list[list[int]]:
        steps, cursor = [], ""
        while True:
            page = (await http.get(f"/v1/run/rollouts?limit=3{query}{cursor}")).json()
            steps.append([group["step"] for group in page["items"]])
            if page["next"] is None:
                return steps
            cursor = f"&cursor={page['next']}"

    assert await pages() == [[7, 6], [5, 4], [3, 2], [1]]
    assert await pages("&search=46") == [[7, 6, 5], [4, 3, 2], [1]]
    kept = [json.dumps({**group, "entry": group["id"]}) for group in reversed(whole)]
    (parts.api.folder / "rollouts.jsonl").write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    await raw(bus).xtrim(bus.keys.of(streams.JOURNAL), maxlen=3, approximate=False)
    assert await pages() == [[7, 6], [5, 4], [3, 2], [1]]
