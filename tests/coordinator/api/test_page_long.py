"""Laws of a page that stays open: what it asks for at rest, and what it holds at a step a second.

PENSTOCK_PAGE_SECONDS=900 measures longer and, with -s, prints the figures of a results file.
"""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from penstock.services.coordinator.api.auth import Access
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger
from tests.coordinator.api.test_page import served
from tests.coordinator.records.test_recorder import commit_group
from tests.support.browser import opened, shows
from tests.support.coordinator_players import Trainer, make, replicas, running, settings

pytestmark = pytest.mark.timeout(600)  # among the first: it waits for most of a minute

SECONDS = float(os.environ.get("PENSTOCK_PAGE_SECONDS", "20"))


async def test_a_page_at_rest_asks_for_little_and_at_a_step_a_second_its_heap_stays_small(
    bus: Bus, tmp_path: Path
) -> None:
    await Ledger(bus).create()
    run = settings(tmp_path, steps=100_000, coordinator={"autostart": False})
    async with (
        running(make(bus, run)) as parts,
        served(parts, tmp_path, Access()) as url,
        replicas(bus),
        opened(url) as page,
    ):
        await parts.api.steering.command("start", "")
        trainer = await Trainer(bus).start()
        for _ in range(20):
            await trainer.step(reward_mean=0.5, grad_norm=0.1, lag_mean=1.0)
        await shows(page, "#tiles", "0.5")
        await asyncio.sleep(5)
        browser = await page.context.new_cdp_session(page)
        received: list[float] = []
        browser.on("Network.loadingFinished", lambda finished: received.append(finished["encodedDataLength"]))
        await browser.send("Network.enable")
        began = time.monotonic()
        await asyncio.sleep(min(120.0, SECONDS / 2))
        bytes_a_minute = sum(received) * 60 / (time.monotonic() - began)
        await browser.send("HeapProfiler.enable")
        heap_bytes: list[int] = []
        began = time.monotonic()
        steps = 0
        while time.monotonic() - began < SECONDS:
            await trainer.step(reward_mean=0.5, grad_norm=0.1, lag_mean=1.0)
            steps += 1
            await asyncio.sleep(max(0.0, began + steps - time.monotonic()))
            if steps % max(1, int(SECONDS / 5)) == 0:
                await browser.send("HeapProfiler.collectGarbage")
                heap_bytes.append((await browser.send("Runtime.getHeapUsage"))["usedSize"])
    print(json.dumps({"bytes_a_minute": round(bytes_a_minute), "heap_bytes": heap_bytes, "steps": steps}))
    assert bytes_a_minute < 100_000
    assert heap_bytes
    assert max(heap_bytes) < 5_000_000


HELD = """const real = fetch; window.held = new Promise((done) => { window.release = done; });
window.fetch = async (path, ...rest) => { if (String(path).startsWith("v1/policies")) await window.held; return real(path, ...rest); };"""


async def test_a_run_is_seen_before_its_many_versions_are_read(bus: Bus, tmp_path: Path) -> None:
    await Ledger(bus).create()
    parts = make(bus, settings(tmp_path))
    await commit_group(bus, 0)
    async with served(parts, tmp_path, Access()) as url, opened(url, before=HELD) as page:
        await shows(page, "#tiles", "1 of")
        await shows(page, "#lineage", "no version yet")
        await page.evaluate("window.release()")
        await shows(page, "#lineage", "v1")
