"""``helm test``: the API is ready, every service is present, the bus passes a message.

Exits 0, or 1 with what was expected. Changes nothing in the run.
"""

import asyncio
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from shared.bus.bus import Bus
from shared.bus.messages import Event
from shared.bus.streams import Stream
from shared.settings import load

SCRATCH = Stream("check", max_entries=10)
WORKING = ("working", "waiting", "degraded")


def ask(url: str, path: str, deadline_s: float) -> Any:
    """Return the API's answer; exit 1 without a 200 by ``deadline_s``."""
    while True:
        try:
            request = urllib.request.Request(url + path, headers=token())  # noqa: S310 (http, from the chart)
            with urllib.request.urlopen(request, timeout=5.0) as answer:  # noqa: S310
                return json.load(answer)
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline_s:
                sys.exit(f"expected 200 from {url}{path}, found: {error}")
            time.sleep(1.0)


def token() -> dict[str, str]:
    """Return the API's authorization header."""
    return {"Authorization": f"Bearer {Path(os.environ['CHECK_TOKEN_FILE']).read_text().strip()}"}


def await_services(url: str, wanted: set[str], deadline_s: float) -> None:
    """Wait for every service; exit 1 at ``deadline_s``."""
    while True:
        rows = ask(url, "/v1/services", deadline_s)["items"]
        found = {row["service"] for row in rows if row["state"] in WORKING}
        if wanted <= found:
            return
        if time.monotonic() > deadline_s:
            sys.exit(f"expected working replicas of {sorted(wanted)}, but only these answered: {sorted(found)}")
        time.sleep(1.0)


async def round_trip(bus_url: str, run_id: str) -> str:
    """Send and receive a message; return the server's name and version."""
    bus = await Bus.connect(bus_url, run_id, wait_s=30.0)
    try:
        sent = Event(at_s=time.time(), source="helm test", name="check", detail="a round trip")
        await bus.publish(SCRATCH, sent)
        found = await bus.newest(SCRATCH, Event)
        if not found or found[0][1] != sent:
            sys.exit(f"expected {sent} back from the bus, found {found}")
        return bus.server
    finally:
        await bus.remove(SCRATCH)
        await bus.close()


def main() -> None:
    """Check the release that this pod belongs to."""
    deadline_s = time.monotonic() + float(os.environ["CHECK_WAIT_S"])
    url, settings = os.environ["CHECK_URL"], load(Path(sys.argv[1]))
    ready = ask(url, "/readyz", deadline_s)
    await_services(url, set(os.environ["CHECK_SERVICES"].split()), deadline_s)
    server = asyncio.run(round_trip(settings.bus.url, settings.run.id))
    print(json.dumps({"readyz": ready, "bus": server, "run": ask(url, "/v1/run", deadline_s)["state"]}))  # noqa: T201


if __name__ == "__main__":
    main()
