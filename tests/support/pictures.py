"""``python -m tests.support.pictures RUN_FOLDER docs/img/overview.png``: the page of a run that has ended, as a picture."""

import argparse
import asyncio
from pathlib import Path

from penstock.services.cli.cluster.deployment import forwarding
from penstock.services.cli.reports.ended_run import EndedRun
from penstock.services.client.coordinator import page_link
from tests.support.browser import opened

WIDTH, HEIGHT = 1280, 1100


async def draw(link: str, file: Path) -> None:
    """Write the top of the page, once its curves are drawn."""
    async with opened(link, WIDTH) as page:
        await page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        await page.locator("#curves svg").first.wait_for()
        await page.wait_for_load_state("networkidle")
        await page.screenshot(path=file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the page of an ended run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    with forwarding():  # which ends the page's server
        asyncio.run(draw(page_link(*EndedRun(arguments.folder).serve()), arguments.file))
