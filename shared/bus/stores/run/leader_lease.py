"""The coordinators' leader lease; its term is a fencing token that scripts check."""

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key

LEASE = key("lease", "hash", "expires unless renewed", "replica, process and term of the coordinator that leads")


async def claim_lease(bus: Bus, replica: str, process: str, ttl_s: float) -> tuple[int, str]:
    """Take or renew the lease; return term (0: another holds it) and holder."""
    term, leader = await bus.script("lease", replica=replica, process=process, ttl_ms=round(ttl_s * 1000))
    return int(term), leader.decode()


async def leave_lease(bus: Bus, process: str) -> None:
    """Release the lease if this process holds it."""
    await bus.script("leave_lease", process=process)
