"""Raw access to the server behind a bus, for tests that inspect or break keys; all other code uses ``penstock.shared.bus``."""

from typing import Any

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client.lua import SCRIPTS


def raw(bus: Bus) -> Any:
    return bus._client


async def empty(bus: Bus) -> None:
    """Delete all that the server has of the run, as one that comes back without its data."""
    await raw(bus).delete(*await raw(bus).keys(bus.keys.named("*")))


def script_text(name: str) -> str:
    return SCRIPTS[name].text
