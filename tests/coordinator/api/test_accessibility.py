"""The page and the report for everybody: axe-core in every state, layout shifts, values by keys, touch and table."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.services.client.coordinator import page_link
from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.api.routes.page import FOLDER
from penstock.services.coordinator.page import make_app
from penstock.services.coordinator.records.ended_run import EndedRun
from penstock.services.coordinator.records.report import write_report
from penstock.services.coordinator.service import Coordinator
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import MemoryReport, MemorySample, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.process.telemetry import Presence, Status, tell
from tests.conftest import PATIENCE_S
from tests.coordinator.api.test_page import TOKEN, parts, serve, served
from tests.coordinator.api.test_schema import bury
from tests.coordinator.records.test_report import whole_run
from tests.support.axe import WATCH_SHIFTS, WIDTHS, violations
from tests.support.browser import opened, shows
from tests.support.coordinator_players import Trainer, replicas

__all__ = ["parts"]
MOST_SHIFT = 0.1
"""A good cumulative layout shift (web.dev/cls)."""
COMPONENTS = ("weights", "shadow", "key-value cache", "moments", "snapshots", "gradients", "activations", "other")
pytestmark = pytest.mark.timeout(20 * PATIENCE_S)


@contextlib.asynccontextmanager
async def trained(parts: Coordinator, bus: Bus, steps: int = 3) -> AsyncIterator[None]:
    """A run with steps, scorers, phases, memory, a checkpoint, a failing replica and dead letters."""
    leave = asyncio.Event()
    failing = Status(state="degraded", last_error="CUDA out of memory")
    beats = [asyncio.create_task(Presence(bus, "rollout", "rollout-0", 60.0, failing).run(leave))]
    beats.append(asyncio.create_task(Presence(bus, "trainer", "trainer-0", 60.0, Status(state="working")).run(leave)))
    await bury(bus, 2)
    await parts.api.steering.command("start", "")
    async with replicas(bus):
        trainer = await Trainer(bus).start()
        scorers = {f"scorer_mean_rule_{number}": number / 20 for number in range(15)}
        phases = {"phase_wait_s": 0.5, "phase_forward_backward_s": 1.0, "phase_commit_s": 0.1}
        for step in range(steps):
            await trainer.step(
                reward_mean=step / 4, reward_std=0.1, reward_min=0.0, reward_max=1.0, **scorers, **phases
            )
    await Ledger(bus).set_checkpoint(PolicyVersion(1), "/checkpoints/step-000001")
    await tell(bus, "test", "an event", "that happened")
    held = dict.fromkeys(COMPONENTS, 2000000000.0)
    samples = tuple(MemorySample("host GPU-0", phase, 2.0 * place, 2.0, 16e9, 80e9, held) for place, phase in enumerate(("wait", "decode"), 1))  # fmt: skip
    await bus.publish(streams.MEMORY, MemoryReport("trainer-0", samples))
    try:
        yield
    finally:
        leave.set()
        await asyncio.gather(*beats)


async def test_axe_has_no_objection_to_a_run_before_while_and_after_it_is_operated(
    parts: Coordinator, bus: Bus, tmp_path: Path
) -> None:
    refused = {}
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(served(parts, tmp_path, Access()))
        async with opened(url, leaves=True) as page:
            await shows(page, "#state", "created")
            refused["created"] = await violations(page, WIDTHS)
            async with trained(parts, bus):
                await shows(page, "#lineage", "checkpoint")
                await shows(page, "#notices", "CUDA out of memory")
                await shows(page, "#memory", "moments")
                refused["running, with failures"] = await violations(page, WIDTHS)
                for summary in await page.locator("details.values > summary").all():
                    await summary.click()
                await page.locator("#rollouts [aria-label=Unfold]").first.click()
                refused["tables and a completion unfolded"] = await violations(page, WIDTHS)
                await page.evaluate(
                    "document.querySelectorAll('details.values').forEach((each) => { each.open = false; })"
                )
                # behind other dialogs the page is the same
                for name in ("Pause…", "Settings…", "Stop…", "Roll back to version 1…", "More of version 1…"):
                    await page.get_by_role("button", name=name).click()
                    await page.locator("dialog[open]").wait_for()
                    refused[name] = await violations(page, part="html" if name == "Pause…" else "dialog")
                    await page.keyboard.press("Escape")
                    await page.locator("dialog").wait_for(state="detached")
                for name, button in (("a replica", "[data-key='replica-rollout-0']"), ("a dead letter", "#notices .warning button")):  # fmt: skip
                    await page.locator(button).first.click()
                    await page.locator("dialog[open]").wait_for()
                    refused[name] = await violations(page, part="dialog")
                    await page.keyboard.press("Escape")
                    await page.locator("dialog").wait_for(state="detached")
                await parts.api.steering.command("pause", "lunch")
                await shows(page, "#state", "paused")
                refused["paused"] = await violations(page)
                await server.aclose()
                await shows(page, "#state", "no answer")
                refused["no answer"] = await violations(page)
    assert len(refused) == 12
    assert not any(refused.values()), "\n".join(f"{state}: {entry}" for state in refused for entry in refused[state])


async def test_axe_has_no_objection_to_asking_for_a_token(parts: Coordinator, tmp_path: Path) -> None:
    async with served(parts, tmp_path, Access(TOKEN.encode())) as url, opened(url) as page:
        await shows(page, "dialog h2", "A token, please")
        assert await violations(page) == []
        await page.get_by_label("Token", exact=True).fill("another-token-of-another-run")
        await page.keyboard.press("Enter")
        await shows(page, "dialog .bad", "does not accept this token")
        assert await violations(page) == []


@pytest.mark.parametrize("of", ["folder", "report", "empty report"])
async def test_axe_has_no_objection_to_an_ended_run_and_its_report(tmp_path: Path, of: str) -> None:
    folder = tmp_path if of == "empty report" else whole_run(tmp_path, steps=50)
    async with contextlib.AsyncExitStack() as server:
        url = write_report(folder).as_uri()
        if of == "folder":
            app = make_app(EndedRun(folder), Access(TOKEN.encode()))
            url = page_link(await server.enter_async_context(serve(app, tmp_path)), TOKEN)
        async with opened(url) as page:
            await page.locator("#activity:has-text('read from its folder'), #records details, .state:has-text('no step yet')").first.wait_for()  # fmt: skip
            for summary in await page.locator("[data-curve=Reward] summary, #records summary").all():
                await summary.click()
            widths = WIDTHS if of == "report" else WIDTHS[:1]
            assert not (refused := await violations(page, widths)), "\n".join(refused)


async def test_nothing_moves_while_the_page_and_the_report_load(parts: Coordinator, bus: Bus, tmp_path: Path) -> None:
    report = write_report(whole_run(tmp_path / "ended")).as_uri()
    async with trained(parts, bus), served(parts, tmp_path, Access()) as url:
        for place, drawn in ((url, "#rollouts .text"), (report, "#records details")):
            async with opened(place, before=WATCH_SHIFTS) as page:
                for width in WIDTHS:
                    await page.set_viewport_size({"width": width, "height": 900})
                    await page.reload()
                    await page.locator(drawn).first.wait_for()
                    await page.locator("#memory svg.chart").first.wait_for()
                    await page.evaluate(
                        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
                    )
                    assert await page.evaluate("window.shifted") <= MOST_SHIFT, (place, width)


async def test_a_chart_s_values_are_read_by_keys_by_touch_and_from_its_table(tmp_path: Path) -> None:
    async with opened(write_report(whole_run(tmp_path)).as_uri(), touch=True) as page:
        card = page.locator("[data-curve=Reward]")
        await page.locator("#curves").focus()
        await page.keyboard.press("Home")
        await shows(page, "[data-curve=Reward] .where", "step 2")
        box = await card.locator("svg.chart").bounding_box()
        assert box is not None
        await page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        await card.locator(".where").filter(has_text=re.compile(r"step 1[0-4]\d")).wait_for()
        await page.locator("#memory").focus()
        await page.keyboard.press("End")
        await shows(page, "#memory .where", "second ")
        await card.locator("summary").focus()
        await page.keyboard.press("Enter")
        await card.locator("thead th").first.wait_for()
        heads = await card.locator("thead th").all_inner_texts()
        assert heads[:4] == ["step", "mean reward", "mean reward, minimum", "mean reward, maximum"]
        newest = await card.locator("tbody tr").first.locator("th, td").all_inner_texts()
        assert newest[0] == "250"
        last, least, most = (float(value) for value in newest[1:4])
        assert last in (least, most), "a bucket of two steps"
        assert least < most
        assert await card.locator("tbody tr").count() == 125


def contrast(*colours: str) -> float:
    """Return the ratio of two colours ``#rrggbb`` or ``#rgb`` (WCAG 2.2)."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = (int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


def test_each_colour_of_a_series_is_its_own_and_stands_out_from_the_card() -> None:
    light, dark, *_ = (FOLDER / "look.css").read_text(encoding="utf-8").split("@media (prefers-color-scheme: dark)")
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w+)", scheme))
        series = {name: colour for name, colour in colours.items() if re.fullmatch(r"c\d+", name)}
        assert len(set(series.values())) == len(series) == 14
        assert {name for name, colour in series.items() if contrast(colour, colours["card"]) < 3} == set()
