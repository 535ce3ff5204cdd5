"""``helm test``: DNS, the bus, a connection that policies must close; then the API and every service.

Exits 0, or 1 with a sentence for what failed. Changes nothing in the run.
"""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.shared.preflight import __main__ as preflight

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


def await_services(url: str, expected: set[str], deadline_s: float) -> None:
    """Wait for every service; exit 1 at ``deadline_s``."""
    while True:
        rows = ask(url, "/v1/services", deadline_s)["items"]
        working = {row["service"] for row in rows if row["state"] in WORKING}
        if expected <= working:
            return
        if time.monotonic() > deadline_s:
            sys.exit(f"expected working replicas of {sorted(expected)}, but only these answered: {sorted(working)}")
        time.sleep(1.0)


def main() -> None:
    """Check the release that this pod belongs to."""
    words = ["--config", sys.argv[1], "--name", urlsplit(os.environ["CHECK_URL"]).hostname or ""]
    findings = list(preflight.findings(preflight.parser().parse_args([*words, *os.environ["CHECK_PREFLIGHT"].split()])))
    if preflight.report(findings, as_json=True):
        sys.exit(1)
    deadline_s = time.monotonic() + float(os.environ["CHECK_WAIT_S"])
    url = os.environ["CHECK_URL"]
    ready = ask(url, "/readyz", deadline_s)
    await_services(url, set(os.environ["CHECK_SERVICES"].split()), deadline_s)
    print(json.dumps({"readyz": ready, "run": ask(url, "/v1/run", deadline_s)["state"]}))  # noqa: T201


if __name__ == "__main__":
    main()
