"""The web page in a real Chromium."""

import asyncio
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from penstock.services.client.coordinator import page_link
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.api.auth import Access, Role
from penstock.services.coordinator.api.routes.page import FOLDER
from penstock.services.coordinator.api.server import ApiServer
from penstock.services.coordinator.service import Coordinator
from penstock.services.reward.failures import Failures
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import MemoryReport, MemorySample, PolicyVersion
from penstock.shared.bus.stores.policy.exports import Exports
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.cordon import Word, cordons
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from penstock.shared.peers import tickets
from penstock.shared.process.telemetry import Presence, Status, tell
from tests.conftest import PATIENCE_S, until
from tests.coordinator.api.test_schema import bury
from tests.support.browser import opened, shows
from tests.support.coordinator_players import Trainer, make, replicas, running, settings
from tests.support.raw_redis import raw

TOKEN, READ_TOKEN = "a-token-that-may-operate", "a-token-that-may-read"
RECORDED = (
    "/v1/run",
    "/v1/run/steps",
    "/v1/run/curves",
    "/v1/run/memory",
    "/v1/events",
    "/v1/policies",
    "/v1/policies/2",
    "/v1/policies/1/compare/3",
)
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture
async def parts(bus: Bus, tmp_path: Path) -> AsyncIterator[Coordinator]:
    """A run whose problems, answers and completions are an attack."""
    problems = tmp_path / "hostile.jsonl"
    row = {"prompt": f"what is {HOSTILE}?", "answer": HOSTILE}
    problems.write_text("".join(json.dumps(row) + "\n" for _ in range(10)), encoding="utf-8")
    await Ledger(bus).create()
    run = settings(tmp_path, steps=50, data={"path": problems}, coordinator={"autostart": False})
    async with running(make(bus, run)) as running_parts:
        yield running_parts


@contextlib.asynccontextmanager
async def serve(app: FastAPI, folder: Path) -> AsyncIterator[str]:
    server = ApiServer("127.0.0.1", 0)
    announced = folder / "coordinator.json"
    serving = asyncio.create_task(server.run(app, announced, "test"))
    try:
        await until(announced.exists)
        yield server.url
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        server.close()


def served(parts: Coordinator, folder: Path, access: Access) -> contextlib.AbstractAsyncContextManager[str]:
    return serve(make_app(dataclasses.replace(parts.api, access=access)), folder)


async def test_its_files_need_no_token_and_may_load_from_their_own_origin_only(
    parts: Coordinator, tmp_path: Path
) -> None:
    async with (
        served(parts, tmp_path, Access(TOKEN.encode())) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        index = await http.get("/", headers={"Accept": "text/html"})
        assert (index.status_code, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
        script = await http.get("/page/page.js", headers={"Accept": "*/*"})
        assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        for answer in (index, script):
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert (await http.get("/page/..%2fapi.py")).status_code == 404
        unknown = await http.get("/page/nothing.js")
        assert (unknown.status_code, unknown.headers["content-type"]) == (404, "application/problem+json")
        assert (await http.get("/v1/run")).status_code == 401


def test_nothing_in_it_parses_html_or_names_another_origin() -> None:
    for file in FOLDER.glob("*.js"):
        text = file.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
            assert word not in text, f"{file.name} says {word}"
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "").replace("//\n", "")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_a_code_opens_one_session_with_the_role_of_its_token(parts: Coordinator, tmp_path: Path) -> None:
    access = Access(TOKEN.encode(), READ_TOKEN.encode())
    async with served(parts, tmp_path, access) as url:
        for token, status in ((TOKEN, 200), (READ_TOKEN, 403)):
            code = page_link(url, token).partition("#code=")[2]
            async with (
                httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
                httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as other,
            ):
                entered = await http.post("/session", headers=bearer(code))
                assert entered.status_code == 200
                assert re.fullmatch(
                    r"penstock-test-\w+=[\w-]{32}; HttpOnly; Path=/; SameSite=strict", entered.headers["set-cookie"]
                )
                assert entered.headers["cache-control"] == "no-store"
                ticket = bearer(entered.json()["ticket"])
                assert (await http.get("/v1/run", headers=ticket)).status_code == 200
                assert (await http.post("/v1/run/start", headers=ticket)).status_code == status
                assert (await http.get("/v1/run")).status_code == 401, "the cookie alone"
                assert (await other.get("/v1/run", headers=ticket)).status_code == 401, "the ticket alone"
                assert (await http.get("/v1/run", headers=bearer(code))).status_code == 401, "the code itself"
                replayed = await other.post("/session", headers=bearer(code))
                assert (replayed.status_code, "set-cookie" in replayed.headers) == (401, False)


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:1", "null"])
async def test_a_page_of_another_origin_cannot_use_a_code(parts: Coordinator, tmp_path: Path, origin: str) -> None:
    async with (
        served(parts, tmp_path, Access(TOKEN.encode())) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        code = page_link(url, TOKEN).partition("#code=")[2]
        refused = await http.post("/session", headers={**bearer(code), "Origin": origin})
        assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
        entered = await http.post("/session", headers={**bearer(code), "Origin": url})
        assert entered.status_code == 200, "the code was not used up"


async def test_codes_that_have_expired_are_changed_or_are_of_another_token_open_nothing(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    expired = tickets.issue(TOKEN.encode(), tickets.PAGE, -1.0)
    foreign = tickets.issue(b"another-token-of-another-run", tickets.PAGE, 300.0)
    end, _, rest = expired.partition(".")
    later = f"{int(end, 16) + 3600:x}.{rest}"
    other_purpose = tickets.issue(TOKEN.encode(), "session x", 300.0)
    keys = {key async for key in raw(bus).scan_iter(bus.keys.named("idempotency:*"))}
    async with (
        served(parts, tmp_path, Access(TOKEN.encode())) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        for code in (expired, foreign, later, other_purpose, "..", "x.y.z", TOKEN):
            headers = {**bearer(code), "Idempotency-Key": "stored"}
            assert (await http.post("/session", headers=headers)).status_code == 401, code
        assert (await http.post("/session")).status_code == 401
    assert {key async for key in raw(bus).scan_iter(bus.keys.named("idempotency:*"))} == keys


def test_a_session_ends() -> None:
    ticket = tickets.issue(TOKEN.encode(), "session cookie", -1.0)
    assert Access(TOKEN.encode()).role(f"Bearer {ticket}", "cookie") is None
    ticket = tickets.issue(TOKEN.encode(), "session cookie", 60.0)
    assert Access(TOKEN.encode()).role(f"Bearer {ticket}", "cookie") is Role.OPERATE


async def test_it_shows_the_run_as_it_goes_on_and_text_of_the_run_stays_text(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    leave = asyncio.Event()
    failing = Status(state="working")
    beating = asyncio.gather(
        Presence(bus, "rollout", "rollout-0", 60.0, Status(state="working")).run(leave),
        Presence(bus, "reward", "reward-0", 0.2, failing).run(leave),
    )
    async with served(parts, tmp_path, Access()) as url, replicas(bus):
        trainer = await Trainer(bus).start()
        async with opened(url) as page:
            await shows(page, "#state", "created")
            await page.get_by_role("button", name="Start…").click()
            await page.get_by_role("button", name="Start", exact=True).click()
            await shows(page, "#state", "running")
            figures = {"learning_rate": 0.125, "clip_fraction": 0.375, "ess": 0.75, "zero_std_groups": 1.0}
            figures |= {"signal_fraction": 0.5, "episode_turns_mean": 2.0, "episode_calls_mean": 1.0}
            figures |= {"ended_stop": 0.75, "ended_length": 0.25, "ended_turns": 0.0, "environment_mean_tries": 3.0}
            await trainer.step(reward_mean=0.25, scorer_mean_answer=0.25, scorer_mean_format=0.5, **figures)
            await shows(page, "#tiles", "0.25")
            for title, label in (
                ("Reward by scorer", "answer 0.25, format 0.5"),
                ("Learning rate", "learning rate 0.125"),
                ("Clipped tokens", "clip fraction 0.375"),
                ("Effective sample size", "ess 0.75"),
                ("Zero-variance groups", "zero std groups 1"),
                ("Groups with signal", "signal fraction 0.5"),
                ("Turns of an episode", "episode turns mean 2, episode calls mean 1"),
                ("How episodes end", "length 0.25, stop 0.75"),
                ("Reported by environments", "tries 3"),
            ):
                await page.locator(f'[data-curve="{title}"] svg[aria-label="{label} at step 1"]').wait_for()
            await Failures(failing).failed("scorer 'mine'", "train.jsonl:7", f"KeyError: {HOSTILE}")
            await shows(
                page,
                "#notices .error",
                f"scorer 'mine' failed 1 times, the last 1 in a row; newest at train.jsonl:7: KeyError: {HOSTILE}",
            )
            await trainer.step(reward_mean=0.625)
            await shows(page, "#tiles", "0.625")  # by itself, without a reload
            await shows(page, "#lineage", "v2")
            await shows(page, "[data-curve=Reward] svg[aria-label]", "")
            await shows(page, ".replica", "rollout-0")
            await shows(page, "#rollouts .text", HOSTILE)
            await page.locator("#search").fill("no such text")
            await page.locator("#search").press("Enter")
            await shows(page, "#rollouts", "no group matches")
            await page.locator("#search").fill(HOSTILE[:9])
            await page.locator("#search").press("Enter")
            await shows(page, "#rollouts mark", HOSTILE[:9])
            await page.get_by_role("button", name="This problem in all versions").first.click()
            await shows(page, "#rollouts .text", HOSTILE)
            await tell(bus, "test", "attack", HOSTILE)
            await shows(page, "#events", HOSTILE)
            assert await page.locator("main img, main script").count() == 0
            assert await page.locator("dialog").count() == 0  # no token is needed
    leave.set()
    await beating


async def test_a_silent_replica_says_for_how_long_in_place_of_its_version(
    parts: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = Heartbeat("rollout", "rollout-0", "working", PolicyVersion(0), "h", 1, "h:1", 0.0, 0.0, 0, "", {})
    monkeypatch.setattr(parts.monitor.replicas, "silent", lambda: [(last, 90.0)])
    async with served(parts, tmp_path, Access()) as url, opened(url) as page:
        await shows(page, ".replica", "no heartbeat for 1 min 3")


async def test_a_pause_asks_for_a_token_that_may_operate_and_for_a_reason(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    await parts.api.steering.command("start", "")
    async with served(parts, tmp_path, Access(TOKEN.encode(), READ_TOKEN.encode())) as url, opened(url) as page:
        await shows(page, "dialog h2", "A token, please")
        await page.get_by_label("Token", exact=True).fill(READ_TOKEN)
        await page.keyboard.press("Enter")
        await shows(page, "#state", "running")
        await page.get_by_role("button", name="Pause…").click()
        await shows(page, "dialog", "No more groups are admitted")
        await page.keyboard.press("Escape")
        assert (await Ledger(bus).status()).state is RunState.RUNNING
        await until(lambda: page.evaluate("document.activeElement.id === 'pause'"))  # the focus has not moved
        await page.keyboard.press("Enter")
        await (
            page.locator("dialog[open]").get_by_label("Reason").fill(f"lunch {HOSTILE}")
        )  # the previous one may still be running
        await page.get_by_role("button", name="Pause", exact=True).click()
        await shows(page, "dialog h2", "A token that may operate")
        await page.get_by_label("Token", exact=True).fill(TOKEN)
        await page.get_by_role("button", name="Use it").click()
        await shows(page, "#state", "paused")
        await shows(page, "#activity", f"lunch {HOSTILE}")
        assert await page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    assert (await Ledger(bus).status()).reason == f"on request: lunch {HOSTILE}"


async def test_a_link_opens_the_page_without_a_token_and_leaves_nothing_of_it_in_the_browser(
    parts: Coordinator, tmp_path: Path
) -> None:
    await parts.api.steering.command("start", "")
    async with served(parts, tmp_path, Access(TOKEN.encode())) as url, opened(page_link(url, TOKEN)) as page:
        await shows(page, "#state", "running")
        assert await page.locator("dialog").count() == 0
        assert (await page.evaluate("location.href"), await page.evaluate("document.cookie")) == (f"{url}/", "")
        assert TOKEN not in await page.evaluate("JSON.stringify(sessionStorage)")
        await page.reload()
        await shows(page, "#state", "running")


async def test_a_rollback_says_what_it_revokes_and_does_it_when_confirmed(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    ledger = Ledger(bus)
    await parts.api.steering.command("start", "")
    async with served(parts, tmp_path, Access()) as url, replicas(bus):
        trainer = await Trainer(bus).start()
        for _ in range(3):
            await trainer.step()
        await ledger.set_checkpoint(PolicyVersion(1), "/checkpoints/step-000001")
        async with opened(url) as page:
            button = page.get_by_role("button", name="Roll back to version 1…")
            await button.click()
            await shows(page, "dialog", "2 versions are revoked (v2 to v3)")
            await page.get_by_role("button", name="Cancel").click()
            assert await ledger.revoked() == frozenset()
            await button.click()
            await page.get_by_role("button", name="Roll back", exact=True).click()
            await until(lambda: _revoked(ledger, {2, 3}))
            await shows(page, "[data-version='3']", "revoked")
            await shows(page, "#operations", "rollback: loading")


async def test_a_version_is_pinned_released_and_exported_from_its_own_dialog_and_the_run_is_stopped_for_good(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    ledger = Ledger(bus)
    await parts.api.steering.command("start", "")
    async with served(parts, tmp_path, Access()) as url, replicas(bus):
        await (await Trainer(bus).start()).step()
        await ledger.set_checkpoint(PolicyVersion(1), "/checkpoints/step-000001")
        async with opened(url) as page:
            for word, said in (("Pin", "pinned"), ("Release", "released"), ("Unpin", "")):
                await page.get_by_role("button", name="More of version 1…").click()
                await shows(page, "dialog dd", "/checkpoints/step-000001")
                await page.get_by_role("button", name=f"{word}…", exact=True).click()
                await page.get_by_role("button", name=word, exact=True).click()
                await page.locator("dialog").wait_for(state="detached")
                await shows(page, "[data-version='1'] .named", said)
            assert (await ledger.pins(), await ledger.released()) == (frozenset(), frozenset({1}))
            await page.get_by_role("button", name="More of version 1…").click()
            await page.get_by_role("button", name="Export…").click()
            await page.get_by_role("button", name="Export", exact=True).click()
            await shows(page, "#operations", "export: waiting, for the trainer")
            assert [(entry.version, entry.adapter) for entry in await Exports(bus).orders()] == [(1, False)]
            await until(lambda: page.evaluate("document.activeElement.ariaLabel === 'More of version 1…'"))
            await page.get_by_role("button", name="Stop…").click()
            await shows(page, "dialog", "cannot be resumed")
            await page.get_by_label("Reason").fill(HOSTILE)
            await page.get_by_role("button", name="Stop for good").click()
            await shows(page, "#state", "stopped")
            assert await page.locator("#stop").is_disabled()
    assert (await ledger.status()).reason == HOSTILE


async def test_a_replica_is_cordoned_and_drained_and_a_dead_letter_put_back_or_discarded(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    await bury(bus, 2)
    leave = asyncio.Event()
    beats = [
        asyncio.create_task(Presence(bus, service, name, 60.0, Status(state="working")).run(leave))
        for service, name in [*(("rollout", f"rollout-{number}") for number in range(6)), ("trainer", "trainer-0")]
    ]

    async def told(name: str, command: str) -> None:
        await page.locator(f"[data-key='replica-{name}']").click()
        await page.get_by_role("button", name=f"{command}…", exact=True).click()
        await page.get_by_label("Reason").fill("a new disk")
        await page.get_by_role("button", name=command, exact=True).click()
        await page.locator("dialog").wait_for(state="detached")

    async with served(parts, tmp_path, Access()) as url, opened(url) as page:
        await page.get_by_role("button", name="and 2 more").click()
        await told("rollout-5", "Cordon")
        assert await cordons(bus) == {"rollout-5": Word.CORDONED}
        # What a row opens is of when it was drawn.
        await page.locator("[data-key='replica-rollout-5'][title*='cordoned']").wait_for()
        await told("rollout-5", "Uncordon")
        assert await cordons(bus) == {}
        await told("rollout-0", "Drain")
        assert await cordons(bus) == {"rollout-0": Word.DRAINING}
        await shows(page, "#operations", "drain: finishing")
        await page.locator("[data-key='replica-trainer-0']").click()
        assert await page.locator("dialog button").all_inner_texts() == ["Close"]
        await page.keyboard.press("Escape")
        for command, left in (("Put back", 1), ("Discard", 0)):
            await page.locator("#notices button").first.click()
            await shows(page, "dialog pre", "12+34=")
            await page.get_by_role("button", name=f"{command}…").click()
            await page.get_by_role("button", name=command, exact=True).click()
            await page.locator("dialog").wait_for(state="detached")
            await until(lambda left=left: _lies(bus, streams.PROMPTS.dead, left))
        await page.locator("#notices button").wait_for(state="detached")
    assert (await bus.counts())["dropped:discarded"] == 1
    leave.set()
    await asyncio.gather(*beats)


async def _lies(bus: Bus, stream: streams.Stream, count: int) -> bool:
    return await bus.length(stream) == count


async def test_live_settings_are_changed_from_what_is_now_and_the_server_says_at_each_field_what_is_wrong(
    parts: Coordinator, tmp_path: Path
) -> None:
    live = parts.api.live
    async with served(parts, tmp_path, Access(TOKEN.encode(), READ_TOKEN.encode())) as url, opened(url) as page:
        await page.get_by_label("Token", exact=True).fill(READ_TOKEN)
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Settings…").click()
        lag, size, rate = (page.locator(f"#live-{name}") for name in ("algorithm-max_lag", "sampling-group_size", "trainer-learning_rate"))  # fmt: skip
        assert [await entry.input_value() for entry in (lag, size, rate)] == ["1", "2", "1e-6"]
        await size.fill("1")
        await rate.fill("fast")
        await page.get_by_role("button", name="Change", exact=True).click()
        await shows(page, "dialog h2", "A token that may operate")
        await page.get_by_label("Token", exact=True).fill(TOKEN)
        await page.get_by_role("button", name="Use it").click()
        await shows(page, "#live-sampling-group_size-wrong", "greater than or equal to 2")
        await shows(page, "#live-trainer-learning_rate-wrong", "valid number")
        assert await size.get_attribute("aria-invalid") == "true"
        await size.fill("6")
        await rate.fill("2e-6")
        assert await live.change(0, {"algorithm.max_lag": 3}, "by another") is not None
        await page.get_by_role("button", name="Change", exact=True).click()
        await shows(page, "dialog [role=alert]", "the settings changed meanwhile")
        assert [await entry.input_value() for entry in (lag, size)] == ["3", "6"]
        await page.get_by_label("Reason").fill(HOSTILE)
        await page.get_by_role("button", name="Change", exact=True).click()
        await page.locator("dialog").wait_for(state="detached")
        await shows(page, "#events", HOSTILE)
    made = await live.read(2)
    assert made is not None
    assert (made.changes, made.reason) == ({"sampling.group_size": 6, "trainer.learning_rate": 2e-6}, HOSTILE)


async def _revoked(ledger: Ledger, versions: set[int]) -> bool:
    return {int(version) for version in await ledger.revoked()} == versions


async def test_a_phone_scrolls_one_way_only_and_tab_reaches_every_button(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    await parts.api.steering.command("start", "")
    async with served(parts, tmp_path, Access()) as url, replicas(bus):
        trainer = await Trainer(bus).start()
        await trainer.step()
        await Ledger(bus).set_checkpoint(PolicyVersion(1), "/checkpoints/step-000001")
        async with opened(url, width=400) as page:
            await shows(page, "#lineage", "checkpoint")
            await shows(page, "#rollouts .text", HOSTILE)
            assert await page.evaluate("document.documentElement.scrollWidth") == 400
            reached = set()
            for _ in range(20):
                await page.keyboard.press("Tab")
                reached.add(
                    await page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
                )
            assert {"Pause…", "Settings…", "Stop…", "Roll back to version 1…", "More of version 1…"} <= reached
            await page.get_by_role("button", name="Settings…").click()
            await shows(page, "dialog", "Completions of a prompt")
            assert await page.evaluate("document.querySelector('dialog').scrollWidth <= 368")
            await page.keyboard.press("Escape")


async def test_without_an_answer_figures_are_grey_commands_are_off_and_the_title_says_so(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    await parts.api.steering.command("start", "")
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(served(parts, tmp_path, Access()))
        async with opened(url, leaves=True) as page:
            await shows(page, "#state", "running")
            await shows(page, "#asof", "as of ")
            await server.aclose()
            await shows(page, "#state", "no answer")
            await shows(page, "#activity", "running at step 0 · check that its process or port-forward runs")
            assert (await page.title()).startswith("no answer: test")
            assert await page.locator("body").get_attribute("data-stale") == ""
            assert await page.locator("#pause").is_disabled()
            assert await page.locator("#stop").is_disabled()


async def test_a_run_that_ended_keeps_its_picture_when_its_coordinator_leaves(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    await parts.api.steering.command("start", "")
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(served(parts, tmp_path, Access()))
        async with opened(url, leaves=True) as page:
            await shows(page, "#state", "running")
            await parts.api.steering.command("stop", "enough")
            await shows(page, "#state", "stopped")
            await server.aclose()
            await shows(page, "#activity", "report.html in the run's folder has its curves and rollouts")
            assert await page.locator("#state").inner_text() == "stopped"
            assert await page.locator("body").get_attribute("data-stale") is None


def as_recorded(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return of a live answer what its run's records have."""
    if path == "/v1/run":
        names: tuple[str, ...] = (
            "state",
            "reason",
            "closed",
            "step",
            "steps",
            "head",
            "newest_version",
            "last",
            "history",
        )
        return {name: answer[name] for name in (*names, "counts", "cursor", "lag_counts", "evaluations")}
    if path == "/v1/policies":
        return {"items": [as_recorded("/v1/policies/2", each) for each in answer["items"]]}
    if path == "/v1/policies/2":
        names = ("version", "parent", "step", "state", "checkpoint", "evaluations", "pinned", "released")
        return {name: answer[name] for name in names}
    if "compare" in path:
        return {**answer, "metrics": {}}  # which this player of a trainer gives its records and reports differently
    return answer


async def test_the_folder_of_an_ended_run_answers_as_its_coordinator_did_and_takes_no_commands(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    folder, answers = parts.api.folder, {}
    sample = MemorySample("host cpu", "decode", 2.0, 1.0, 3e9, 8e9, {"weights": 3e9})
    async with served(parts, tmp_path, Access()) as url, replicas(bus):
        await parts.api.steering.command("start", "")
        trainer = await Trainer(bus).start()
        for reward in (0.25, 0.5, 0.625):
            await trainer.step(reward_mean=reward, scorer_mean_answer=reward)
        await Ledger(bus).release(PolicyVersion(2), released=True)
        await tell(bus, "api", "policy released", HOSTILE, version=2)
        await bus.publish(streams.MEMORY, MemoryReport("trainer-0", (sample,)))
        await parts.api.steering.command("stop", HOSTILE)
        async with opened(url) as page, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            await shows(page, "#state", "stopped")
            await shows(page, "#report", "Report")
            report = await http.get("/report.html", headers={"Accept": "text/html"})
            for path in RECORDED:
                answers[path] = as_recorded(path, (await http.get(path)).raise_for_status().json())
    (folder / "settings.toml").write_text("run.steps = 50\n")  # of which this player of `penstock up` has none
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.services.coordinator.page", str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told = json.loads(await process.stdout.readline())
    async with httpx.AsyncClient(base_url=told["url"], timeout=PATIENCE_S, headers=bearer(told["token"])) as http:
        for path in RECORDED:
            assert as_recorded(path, (await http.get(path)).raise_for_status().json()) == answers[path], path
        assert (await http.get("/report.html")).content == report.content
        assert "sandbox" in report.headers["content-security-policy"]
        assert (await http.get("/v1/run", headers=bearer("x" * 32))).status_code == 401
        refused = await http.post("/v1/policies/2/pin", headers={"Idempotency-Key": "once"})
        assert (refused.status_code, "takes no commands" in refused.json()["detail"]) == (409, True)
    async with opened(page_link(told["url"], told["token"])) as page:
        await shows(page, "#activity", f"{HOSTILE} · read from its folder")
        await shows(page, "#tiles", "0.625")
        await shows(page, "#events", HOSTILE)
        await shows(page, "#memory", "decode")
        await page.get_by_role("button", name="More of version 2…").click()
        await shows(page, "dialog", "released")
        buttons = "dialog button, .commands button:not(#token), .acts button"
        enabled = await page.locator(f":is({buttons}):visible:enabled").all_inner_texts()
        assert {text for text in enabled if "…" in text} == {"More…"}
        await page.keyboard.press("Escape")
        async with page.expect_download() as saved:
            await page.locator("#report").click()
        assert Path(await (await saved.value).path()).read_bytes() == report.content
    process.stdin.close()  # as when the command that started it is killed
    assert await process.wait() == 0


async def test_a_link_that_was_used_and_a_wrong_token_are_said_where_a_token_is_asked_for(
    parts: Coordinator, tmp_path: Path
) -> None:
    async with served(parts, tmp_path, Access(TOKEN.encode())) as url:
        link = page_link(url, TOKEN)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            await http.post("/session", headers=bearer(link.partition("#code=")[2]))
        async with opened(link) as page:
            await shows(page, "dialog .bad", "this link was used or has expired: try `penstock page`")
            await page.get_by_label("Token", exact=True).fill("another-token-of-another-run")
            await page.keyboard.press("Enter")
            await shows(page, "dialog .bad", "does not accept this token")
            await page.locator("dialog[open]").get_by_label("Token", exact=True).fill(TOKEN)
            await page.keyboard.press("Enter")
            await shows(page, "#state", "created")


async def test_failing_replicas_and_dead_letters_by_cause_are_at_the_top(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    await bury(bus, 2)
    leave = asyncio.Event()
    failing = Status(state="degraded", last_error=f"CUDA out of memory {HOSTILE}")
    beating = asyncio.create_task(Presence(bus, "rollout", "rollout-0", 60.0, failing).run(leave))
    async with served(parts, tmp_path, Access()) as url, opened(url) as page:
        await shows(page, "#notices", "2 dead letters of prompts")
        await shows(page, "#notices .error", f"rollout-0: CUDA out of memory {HOSTILE}")
    leave.set()
    await beating


async def test_what_has_not_changed_is_not_sent_again_and_the_rest_is_compressed(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    for number in range(50):
        await tell(bus, "test", "an event", f"number {number}")
    async with (
        served(parts, tmp_path, Access()) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        for path in ("/v1/run/curves", "/v1/run/memory", "/v1/run/rollouts", "/v1/policies", "/v1/events"):
            first = await http.get(path)
            again = await http.get(path, headers={"If-None-Match": first.headers["etag"]})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert first.headers["content-encoding"] == "gzip"
        await tell(bus, "test", "an event", "new")
        assert (await http.get(path, headers={"If-None-Match": first.headers["etag"]})).status_code == 200
