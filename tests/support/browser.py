"""A page in a real Chromium that must not have errors."""

import contextlib
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from tests.conftest import PATIENCE_S, need, need_module

if TYPE_CHECKING:
    from playwright.async_api import Page

# CI runs as root in a container; only this coordinator's page is opened.
CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")
WAIT_MS = 1000 * PATIENCE_S


@contextlib.asynccontextmanager
async def opened(
    url: str, width: int = 1280, *, leaves: bool = False, touch: bool = False, before: str = ""
) -> AsyncIterator["Page"]:
    """Open the page; afterwards check for errors and for requests to other hosts.

    ``leaves``: its server may end. ``before``: a script that runs before the page's own.
    """
    need_module("playwright", "playwright")
    chromium = need("chromium", "chromium")
    from playwright.async_api import async_playwright

    wrong: list[str] = []
    asked: set[str] = set()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM), timeout=WAIT_MS)
        page = await browser.new_page(viewport={"width": width, "height": 900}, has_touch=touch)
        await page.add_init_script(before or ";")
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.add(request.url))
        await page.goto(url)
        yield page
        title = await page.title()
        await browser.close()
    # refused requests (token, revision, values) are logged by the browser, not the page
    expected = "status of 4(01|03|12|22) " + ("|ERR_(CONNECTION|INCOMPLETE)" if leaves else "")
    assert [entry for entry in wrong if not re.search(expected, entry)] == []
    assert {entry for entry in asked if not entry.startswith(url.partition("#")[0])} == set()
    assert title != "taken"


async def shows(page: "Page", selector: str, text: str) -> None:
    await page.locator(selector).filter(has_text=text).first.wait_for()
