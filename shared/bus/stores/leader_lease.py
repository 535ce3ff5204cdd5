"""The key by which one of several coordinators leads: it expires, and its term is a fencing token that scripts check."""

from shared.bus.bus import Bus
from shared.bus.keys import key

LEASE = key("lease", "hash", "expires unless renewed", "replica, process and term of the coordinator that leads")


async def claim_lease(bus: Bus, replica: str, process: str, ttl_s: float) -> tuple[int, str]:
    """Take or renew the lease; return its term, 0 where another replica holds it, and the replica that holds it."""
    term, leader = await bus.script("lease", replica=replica, process=process, ttl_ms=round(ttl_s * 1000))
    return int(term), leader.decode()


async def leave_lease(bus: Bus, process: str) -> None:
    """Let another coordinator lead at once; nothing where this process does not hold the lease."""
    await bus.script("leave_lease", process=process)
