"""The release that a run's keys belong to, so that two releases cannot share them by accident."""

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key
from penstock.shared.errors import SettingsError

OWNER = key("owner", "string", "the run's", "the Kubernetes namespace and release whose services use these keys")


async def claim(bus: Bus, run_id: str, owner: str) -> None:
    """Note that the keys belong to ``owner``; empty, as outside Kubernetes: any owner.

    Raises:
        SettingsError: they belong to another release.
    """
    if not owner:
        return
    await bus.write(OWNER, "SET", owner, "NX")
    theirs = (await bus.get(OWNER) or b"").decode(errors="replace")
    if theirs != owner:
        raise SettingsError(
            f"expected the run {run_id!r} on this bus to belong to the release {owner}, found that it belongs to {theirs}: "
            f"set run.id to another name, or, if {theirs} is gone, delete the key {bus.keys.of(OWNER)}"
        )
