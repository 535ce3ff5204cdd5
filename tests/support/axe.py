"""axe-core on a page of the browser, and the page's layout shifts."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import need_module

if TYPE_CHECKING:
    from playwright.async_api import Page

WIDTHS = (390, 768, 1280)
WATCH_SHIFTS = """window.shifted = 0; new PerformanceObserver((list) => list.getEntries().forEach((entry) => {
    if (!entry.hadRecentInput) window.shifted += entry.value; })).observe({ type: "layout-shift", buffered: true });"""


def source() -> str:
    need_module("axe_playwright_python", "axe-playwright-python")
    found_spec = importlib.util.find_spec("axe_playwright_python")
    assert found_spec is not None
    assert found_spec.origin is not None
    return (Path(found_spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")


async def violations(page: "Page", widths: Sequence[int] = WIDTHS[:1], part: str = "html") -> list[str]:
    """Return what axe refuses of a part at each width, and of dark colours at the last. The page keeps its state and gets its width back."""
    before = page.viewport_size
    assert before is not None
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(source())  # through the debugger: the page's policy admits no script of another origin
    refused = []
    for width, scheme in [*((width, "light") for width in widths), (widths[-1], "dark")]:
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        only = "" if scheme == "light" else "runOnly: ['color-contrast'],"  # the rest does not look at colours
        result: dict[str, Any] = await page.evaluate(f"axe.run('{part}', {{ {only} resultTypes: ['violations'] }})")
        assert result["passes"], "axe looked at nothing"
        for entry in result["violations"]:
            nodes = [f"{node['html'][:160]} {node['failureSummary']}" for node in entry["nodes"][:3]]
            refused.append(f"{width} {scheme}: {entry['id']}: {nodes}")
    await page.set_viewport_size(before)
    return refused
