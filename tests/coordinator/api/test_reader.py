"""Laws of the page's reader: long completions are lines, and a person finds what a reward function was tricked by."""

import dataclasses
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock.services.coordinator import page
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.records.ended_run import EndedRun
from penstock.services.coordinator.records.jsonl import BoundedLines, every_second, read
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyVersion, SampleScores, Score, ScoreStatus, StepReport
from penstock.shared.bus.stores.policy.ledger import Ledger
from tests.conftest import PATIENCE_S
from tests.coordinator.api.test_page import served
from tests.support import builders
from tests.support.browser import opened, shows
from tests.support.coordinator_players import make, settings

SCORERS = ("answer", "format", "style", "unit_tests")
TRICK = "assert True  # the tests are deleted"


def group(number: int, trick: int | None = None) -> Experience:
    """16 completions of 20,000 characters; one of them may have the trick in its middle, and a reward for it."""
    made = builders.experience(number)
    samples, rewards, scores = [], [], []
    for place in range(16):
        text = f"thought {number}.{place} " + "so it must be that " * 1052
        text = text[:10_000] + TRICK + text[10_000 + len(TRICK) :] if place == trick else text
        values = dict.fromkeys(SCORERS, 0.25) | ({"unit_tests": 1.0, "answer": 0.0} if place == trick else {})
        samples.append(dataclasses.replace(made.group.samples[0], text=text[:20_000]))
        rewards.append(sum(values.values()) / 4)
        scores.append(SampleScores(tuple(Score(name, ScoreStatus.OK, value) for name, value in values.items())))
    prompt = dataclasses.replace(
        made.group.prompt, sampling=dataclasses.replace(made.group.prompt.sampling, samples=16)
    )
    whole = dataclasses.replace(made.group, prompt=prompt, samples=tuple(samples))
    return dataclasses.replace(made, group=whole, rewards=np.array(rewards, dtype=np.float32), scores=tuple(scores))


async def test_a_planted_reward_hack_is_found_in_a_sort_and_two_clicks(bus: Bus, tmp_path: Path) -> None:
    await Ledger(bus).create()
    parts = make(bus, settings(tmp_path))
    for step in range(1, 6):
        data = wire.encode(group(step, trick=11 if step == 3 else None))
        await bus.append(streams.JOURNAL, {"step": str(step), "data": data})
    async with served(parts, tmp_path, Access()) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            page_of_lines = await http.get("/v1/run/rollouts?limit=5&excerpt=200")
            assert len(page_of_lines.content) < 100_000, "of 1.6 million characters"
            first = page_of_lines.json()["items"][0]["completions"][0]
            assert (len(first["text"]), first["characters"]) == (200, 20_000)
        async with opened(url) as page:
            await shows(page, "#rollouts .tail", "so it must be that")
            height = (await page.locator("#rollouts").bounding_box() or {"height": 0.0})["height"]
            assert height / 80 < 60, "one line a completion"
            await page.get_by_role("button", name="unit_tests", exact=True).click()  # 1: largest first
            assert (await page.locator("#rollouts tbody td:nth-child(7)").first.text_content()) == "1"
            await page.get_by_role("button", name="Unfold").first.click()  # 2: its whole text
            await shows(page, "#rollouts pre.text", TRICK)
            await page.locator("#search").fill("ARE DELETED")  # 3 and 4: in which other groups?
            await page.locator("#search").press("Enter")
            await shows(page, "#rollouts mark", "are deleted")
            await shows(page, "#rollouts .filter", "16 of 16 loaded completions")
            await page.get_by_label("Field to filter by").select_option("unit_tests")
            await page.get_by_label("From", exact=True).fill("0.5")
            await page.keyboard.press("Tab")
            await shows(page, "#rollouts .filter", "1 of 16 loaded completions")


async def test_groups_are_read_one_by_one_and_up_to_a_step_from_journal_and_records(bus: Bus, tmp_path: Path) -> None:
    await Ledger(bus).create()
    parts = make(bus, settings(tmp_path))
    lines = BoundedLines(parts.api.folder / "rollouts.jsonl", 1 << 20, every_second)
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for step in (7, 8):
            await bus.append(streams.JOURNAL, {"step": str(step), "data": wire.encode(builders.experience(step))})
        (newest, _) = (await http.get("/v1/run/rollouts")).json()["items"]
        lines.append([{**newest, "entry": f"{step}-0", "step": step} for step in (2, 4, 6)])

        async def steps(query: str) -> list[int]:
            return [item["step"] for item in (await http.get(f"/v1/run/rollouts?{query}")).json()["items"]]

        assert await steps("step=9") == [8, 7, 6, 4, 2]
        assert await steps("step=7") == [7, 6, 4, 2]
        assert await steps("step=5") == [4, 2]
        assert await steps("step=1") == []
        assert (await http.get(f"/v1/run/rollouts/{newest['id']}")).json() == newest
        assert (await http.get("/v1/run/rollouts/4-0")).json()["step"] == 4
        assert (await http.get("/v1/run/rollouts/5-0")).status_code == 404


async def test_rollouts_of_an_ended_run_are_read_from_its_folder_as_they_were_live(bus: Bus, tmp_path: Path) -> None:
    """Text, tokens, versions, scores, and of its step the mismatch of trainer and engine, with search and sizes."""
    await Ledger(bus).create()
    parts = make(bus, settings(tmp_path, coordinator={"sample_every_steps": 1}))
    folder = parts.api.folder
    for step in (1, 2):
        await bus.append(streams.JOURNAL, {"step": str(step), "data": wire.encode(group(step, trick=11))})
        report = StepReport(
            step, PolicyVersion(step), 1.8e9 + step, 16, {"logprob_gap": 0.25 * step, "reward_mean": 0.5}, {"0": 16}
        )
        await bus.publish(streams.STEPS, report)
        await parts.recorder.catch_up()
    (folder / "settings.toml").write_text("run.steps = 2\n")
    (folder / "summary.json").write_text(json.dumps({"run_id": "ended", "state": "finished", "steps": 2}))
    apps = make_app(parts.api), page.make_app(EndedRun(folder), Access())
    clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") for app in apps]
    async with clients[0] as live, clients[1] as ended:
        (newest, _) = (await live.get("/v1/run/rollouts")).json()["items"]
        assert (newest["completions"][11]["versions"], len(newest["completions"][11]["text"])) == ([0], 20_000)
        for path in (
            "/v1/run/rollouts", "/v1/run/rollouts?excerpt=200&limit=1", "/v1/run/rollouts?step=1",
            "/v1/run/rollouts?search=ARE DELETED", f"/v1/run/rollouts/{newest['id']}", "/v1/run/steps",
        ):  # fmt: skip
            assert (await ended.get(path)).raise_for_status().json() == (await live.get(path)).json(), path
        (line, _) = (await ended.get("/v1/run/steps")).json()["items"]
        assert line["metrics"]["logprob_gap"] == 0.5


@pytest.mark.parametrize("count", [9, 10])
def test_rollouts_on_disk_are_bounded_and_keep_the_newest(tmp_path: Path, count: int) -> None:
    file = tmp_path / "rollouts.jsonl"
    lines = BoundedLines(file, 5000, every_second)
    for step in range(1, count + 1):
        lines.append([{"entry": f"{step}-0", "step": step, "text": "x" * 900}])
    kept = [line["step"] for line in read(file)]
    assert (kept[-1], lines.last) == (count, {"entry": f"{count}-0", "step": count, "text": "x" * 900})
    assert file.stat().st_size <= 5000
    assert list(tmp_path.iterdir()) == [file]
