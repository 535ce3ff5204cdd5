"""The server behind a bus, for tests that look at keys or break them. Nothing else speaks Redis outside of ``shared.bus``."""

from typing import Any

from shared.bus.bus import Bus
from shared.bus.lua import SCRIPTS


def raw(bus: Bus) -> Any:
    """Return the redis-py client of a bus, with all commands."""
    return bus._client


def script_text(name: str) -> str:
    """Return a script as the server gets it."""
    return SCRIPTS[name].text
