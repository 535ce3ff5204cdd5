"""The page for people, in a real Chromium, on a real coordinator: what it shows, what it does, and what it never does."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from services.coordinator.access import Access
from services.coordinator.api import make_app
from services.coordinator.page_routes import FOLDER
from services.coordinator.server import Server
from services.coordinator.service import Coordinator
from shared.bus import Bus
from shared.ledger import Ledger, RunState
from shared.messages import PolicyVersion
from shared.telemetry import Presence, Status, tell
from tests.conftest import need, need_module, until
from tests.coordinator_players import Trainer, make, replicas, running, settings

if TYPE_CHECKING:
    from playwright.async_api import Page

TOKEN, READ_TOKEN = "a-token-that-may-operate", "a-token-that-may-read"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
# Without a sandbox of its own: CI runs as root in a container. It opens nothing but this coordinator's page.
CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")
WAIT_MS = 30_000


@pytest.fixture
async def parts(bus: Bus, tmp_path: Path) -> AsyncIterator[Coordinator]:
    """A run whose problems, answers and so completions are an attack."""
    problems = tmp_path / "hostile.jsonl"
    row = {"prompt": f"what is {HOSTILE}?", "answer": HOSTILE}
    problems.write_text("".join(json.dumps(row) + "\n" for _ in range(10)), encoding="utf-8")
    await Ledger(bus).create()
    run = settings(tmp_path, steps=50, data={"path": problems}, coordinator={"autostart": False})
    async with running(make(bus, run)) as found:
        yield found


@contextlib.asynccontextmanager
async def served(parts: Coordinator, folder: Path, access: Access) -> AsyncIterator[str]:
    """Serve the API and the page as a coordinator's process does."""
    server = Server("127.0.0.1", 0)
    announced = folder / "coordinator.json"
    app = make_app(dataclasses.replace(parts.api, access=access))
    serving = asyncio.create_task(server.run(app, announced, "test"))
    try:
        await until(announced.exists)
        yield server.url
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        server.close()


@contextlib.asynccontextmanager
async def opened(url: str, width: int = 1280) -> AsyncIterator["Page"]:
    """Open the page in Chromium; at the end nothing may have gone wrong in it, and nothing may have gone elsewhere."""
    need_module("playwright", "playwright")
    chromium = need("chromium", "chromium")
    from playwright.async_api import async_playwright

    wrong: list[str] = []
    asked: set[str] = set()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM))
        page = await browser.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.add(request.url))
        await page.goto(url)
        yield page
        title = await page.title()
        await browser.close()
    # that a request without a token is refused is what the browser, not the page, notes on its console
    assert [one for one in wrong if "status of 401" not in one and "status of 403" not in one] == []
    assert {one for one in asked if not one.startswith(url)} == set()
    assert title != "taken"


async def shows(page: "Page", selector: str, text: str) -> None:
    await page.locator(selector).filter(has_text=text).first.wait_for()


# ---------------------------------------------------------------- its files


async def test_its_files_need_no_token_and_may_load_from_their_own_origin_only(
    parts: Coordinator, tmp_path: Path
) -> None:
    async with served(parts, tmp_path, Access(TOKEN.encode())) as url, httpx.AsyncClient(base_url=url) as http:
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


# ---------------------------------------------------------------- in a browser


async def test_it_shows_the_run_as_it_goes_on_and_text_of_the_run_stays_text(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    leave = asyncio.Event()
    beating = asyncio.create_task(Presence(bus, "rollout", "rollout-0", 60.0, Status(state="working")).run(leave))
    async with served(parts, tmp_path, Access()) as url, replicas(bus):
        trainer = await Trainer(bus).start()
        async with opened(url) as page:
            await shows(page, "#state", "created")
            await page.get_by_role("button", name="Start…").click()
            await page.get_by_role("button", name="Start", exact=True).click()
            await shows(page, "#state", "running")
            await trainer.step(reward_mean=0.25)
            await shows(page, "#tiles", "0.25")
            await trainer.step(reward_mean=0.625)
            await shows(page, "#tiles", "0.625")  # by itself, without a reload
            await shows(page, "#lineage", "v2")
            await shows(page, "[data-curve=Reward] svg[aria-label]", "")
            await shows(page, ".replica", "rollout-0")
            await shows(page, "#rollouts .text", HOSTILE)
            await tell(bus, "test", "attack", HOSTILE)
            await shows(page, "#events", HOSTILE)
            assert await page.locator("main img, main script").count() == 0
            assert await page.locator("dialog").count() == 0  # no token is asked for where none is needed
    leave.set()
    await beating


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
        await shows(page, "dialog", "Nothing more is admitted")
        await page.keyboard.press("Escape")
        assert (await Ledger(bus).status()).state is RunState.RUNNING
        assert await page.evaluate("document.activeElement.id") == "pause"  # the focus is where it was
        await page.keyboard.press("Enter")
        await page.get_by_label("Why?").fill(f"lunch {HOSTILE}")
        await page.get_by_role("button", name="Pause", exact=True).click()
        await shows(page, "dialog h2", "A token that may operate")
        await page.get_by_label("Token", exact=True).fill(TOKEN)
        await page.get_by_role("button", name="Use it").click()
        await shows(page, "#state", "paused")
        await shows(page, "#activity", f"lunch {HOSTILE}")
        assert await page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    assert (await Ledger(bus).status()).reason == f"lunch {HOSTILE}"


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
            await until(lambda: _revoked(ledger, {2, 3}), timeout_s=30)
            await shows(page, "[data-version='3']", "revoked")
            await shows(page, "#operations", "rollback: loading")


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
            for _ in range(12):
                await page.keyboard.press("Tab")
                reached.add(
                    await page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
                )
            assert {"Pause…", "Roll back to version 1…"} <= reached
