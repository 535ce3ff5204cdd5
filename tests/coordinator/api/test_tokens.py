"""Laws of the reader of tokens: the recorded values, of a live and of an ended run, shown as text whatever a model wrote."""

import json
from pathlib import Path
from typing import Any

import httpx

from penstock.services.coordinator import page as page_server
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.records.ended_run import EndedRun
from penstock.services.coordinator.records.report import write_report
from penstock.services.coordinator.service import Coordinator
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.files.token_records import TokenValues, record_path, write_record
from tests.coordinator.api.test_page import served
from tests.coordinator.records.test_recorder import put_steps
from tests.support import builders
from tests.support.axe import WIDTHS, violations
from tests.support.browser import opened, shows
from tests.support.coordinator_players import make, settings

ATTACK = "</pre><img src=x onerror=\"document.title='taken'\">"
TEXTS = ["So", " 4", "\n", ATTACK, "", "字", "<eos>"]
VALUES: TokenValues = {
    "ids": [7, 8, 9, 10, 11, 12, 1],
    "texts": TEXTS,
    "logprobs": [-0.01, -0.3, -1.0, None, -2.0, -9.5, -0.02],
    "trainer_logprobs": [-0.015, -0.33, -1.1, None, -2.5, -7.0, None],
    "versions": [3, 3, 3, 3, 4, 4, 4],
}


async def journalled(bus: Bus, step: int, version: int | None) -> None:
    fields = {"step": str(step), "data": wire.encode(builders.experience(step))}
    await bus.append(streams.JOURNAL, fields if version is None else {**fields, "version": str(version)})


async def two_groups(bus: Bus, tmp_path: Path) -> Coordinator:
    """Steps 1, of an older Penstock, and 2, of which the tokens are recorded."""
    parts = make(bus, settings(tmp_path, coordinator={"sample_every_steps": 1}))
    for step, version in ((1, None), (2, 5)):
        await journalled(bus, step, version)
        await put_steps(bus, step)
        await parts.recorder.catch_up()
    write_record(parts.api.folder, 5, 2, [VALUES, {**VALUES, "texts": None}])
    return parts


async def test_tokens_are_read_from_a_live_and_an_ended_run_in_parts(bus: Bus, tmp_path: Path) -> None:
    parts = await two_groups(bus, tmp_path)
    folder = parts.api.folder
    (folder / "settings.toml").write_text("run.steps = 2\n")
    (folder / "summary.json").write_text(json.dumps({"run_id": "ended", "state": "finished", "steps": 2}))
    for app in (make_app(parts.api), page_server.make_app(EndedRun(folder), Access())):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

            async def tokens(entry: str, query: str = "") -> Any:
                answer = await http.get(f"/v1/run/rollouts/{entry}/tokens{query}")
                return answer.json() if answer.status_code == 200 else answer.status_code

            new, old = (await http.get("/v1/run/rollouts")).json()["items"]
            assert [(each["version"], each["has_tokens"]) for each in (new, old)] == [(5, True), (None, False)]
            assert await tokens(new["id"]) == {"total": 7, "first": 0, **VALUES}
            assert (await tokens(new["id"], "?completion=1"))["texts"] is None
            part = await tokens(new["id"], "?first=3&limit=2")
            assert (part["total"], part["first"], part["ids"], part["texts"]) == (7, 3, [10, 11], [ATTACK, ""])
            assert (await tokens(new["id"], "?first=99"))["ids"] == []
            assert [await tokens(new["id"], "?completion=2"), await tokens(old["id"]), await tokens("9-9")] == [404] * 3
            assert await tokens(new["id"], "?limit=100000") == 422
            many: list[Any] = [[{}], [None], [1, 2], {"0": 1}, [{**VALUES, "logprobs": ["x"]}]]
            for damaged in many:
                record_path(folder, 5, 2).write_text(json.dumps({"completions": damaged}))
                assert await tokens(new["id"]) == 404
            write_record(folder, 5, 2, [VALUES, {**VALUES, "texts": None}])


async def test_the_sampled_group_is_that_whose_tokens_are_recorded_if_the_trainer_is_ahead(
    bus: Bus, tmp_path: Path
) -> None:
    parts = make(bus, settings(tmp_path, coordinator={"sample_every_steps": 5}))
    for step in range(1, 8):
        await journalled(bus, step, step)
        await put_steps(bus, step)
    await parts.recorder.catch_up()
    await journalled(bus, 8, 8)
    await put_steps(bus, 8)
    await parts.recorder.catch_up()
    lines = (parts.api.folder / "rollouts.jsonl").read_text().splitlines()
    assert [(json.loads(line)["step"], json.loads(line)["version"]) for line in lines] == [(5, 5)]


async def test_a_person_reads_tokens_by_colour_by_keys_and_in_a_table(bus: Bus, tmp_path: Path) -> None:
    parts = await two_groups(bus, tmp_path)
    async with served(parts, tmp_path, Access()) as url, opened(url) as page:
        await reads_tokens(page)
        assert not (refused := await violations(page, WIDTHS)), "\n".join(refused)
        await page.get_by_role("button", name="Text", exact=True).click()
        await shows(page, "#rollouts .whole pre", "46")
        assert await page.locator(".token").count() == 0
        await page.get_by_role("button", name="Unfold").last.click()  # of a group without tokens
        assert await page.locator(".detail .whole").count() == 2
        assert await page.locator(".ways").count() == 1


async def test_a_report_has_the_same_reader(bus: Bus, tmp_path: Path) -> None:
    parts = await two_groups(bus, tmp_path)
    async with opened(write_report(parts.api.folder).as_uri()) as page:
        await reads_tokens(page)
        assert not (refused := await violations(page)), "\n".join(refused)


async def test_a_report_has_no_more_tokens_than_it_can_carry_and_the_last_ones(tmp_path: Path, bus: Bus) -> None:
    parts = await two_groups(bus, tmp_path)
    most: TokenValues = {
        "ids": list(range(9000)), "texts": None, "logprobs": [-1.0] * 9000, "trainer_logprobs": [-1.0] * 9000,
        "versions": [1] * 9000,
    }  # fmt: skip
    write_record(parts.api.folder, 5, 2, [most, VALUES])
    text = write_report(parts.api.folder).read_text()
    data = json.loads(text.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    first, second = data["rollouts"][0]["tokens"]
    assert (first["total"], first["first"], first["ids"]) == (9000, 8500, list(range(8500, 9000)))
    assert second["ids"] == VALUES["ids"]


async def reads_tokens(page: Any) -> None:
    """Unfold the first completion and read it by mismatch."""
    await page.get_by_role("button", name="Unfold").first.click()
    await page.get_by_role("button", name="Mismatch", exact=True).click()
    tokens = page.locator(".tokens .token")
    assert await tokens.all_text_contents() == TEXTS
    classes = [await tokens.nth(place).get_attribute("class") for place in range(len(TEXTS))]
    assert classes == [
        "token t0", "token t1", "token t2 broken", "token t0 given", "token t3 empty", "token t4", "token t0 given",
    ]  # fmt: skip
    assert await page.locator(".tokens .since").all_text_contents() == ["v3", "v4"]
    await page.locator(".tokens").focus()
    for _ in range(2):
        await page.keyboard.press("ArrowRight")
    await shows(
        page,
        ".whole .values",
        'Token 2 of 7: " 4", id 8 · v3, engine −0.3000 (probability 0.741) · trainer −0.3300, difference −0.0300',
    )
    await page.keyboard.press("End")
    await shows(page, ".whole .values", "not trained")
    await tokens.nth(3).hover()
    await shows(page, ".whole .values", "not sampled by a policy · not trained")
    await page.get_by_text("Values of each token").click()
    await shows(page, ".whole table tr:nth-child(6)", "612")
    await shows(page, ".whole table tr:nth-child(6)", "2.5000")
    await page.get_by_role("button", name="Logprob", exact=True).click()
    await shows(page, ".tokens .t4", "字")
    assert await page.locator("img:not([src='page/icon.svg'])").count() == 0
