"""Data of the live view, read at one moment."""

import dataclasses

from penstock.shared.bus.bus import Bus, read_counts
from penstock.shared.bus.keys import COUNTS, RUN
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.ledger import IN_FLIGHT, RunStatus, read_status
from penstock.shared.bus.stores.policy.policies import REVOKED
from penstock.shared.bus.stores.run.functions import FUNCTIONS, History, decode


@dataclasses.dataclass(frozen=True, slots=True)
class Overview:
    status: RunStatus
    counts: dict[str, int]
    guards: bytes
    revoked: frozenset[PolicyVersion]
    groups_in_flight: int
    functions: History


async def overview(bus: Bus) -> Overview:
    run, counts, revoked, functions, *in_flight = await bus.ask_all(
        ("HGETALL", RUN),
        ("HGETALL", COUNTS),
        ("SMEMBERS", REVOKED),
        ("HGETALL", FUNCTIONS),
        *IN_FLIGHT,
    )
    fenced = frozenset(PolicyVersion(int(version)) for version in revoked)
    return Overview(
        read_status(run),
        read_counts(counts),
        run.get(b"guards", b""),
        fenced,
        sum(in_flight),
        decode(functions),
    )
