"""What the live view shows of the run, read at one moment."""

import dataclasses
from collections.abc import Mapping

from shared.bus.bus import Bus, read_counts
from shared.bus.keys import COUNTS, RUN
from shared.bus.messages import PolicyVersion
from shared.bus.stores.evaluations import EVALUATIONS
from shared.bus.stores.ledger import RunStatus, read_status
from shared.bus.stores.policies import REVOKED


@dataclasses.dataclass(frozen=True, slots=True)
class Overview:
    """What the live view shows of the run."""

    status: RunStatus
    counts: dict[str, int]
    guards: bytes
    """As the leader noted them."""
    evaluations: Mapping[bytes, bytes]
    """Version → results, as :func:`shared.bus.stores.evaluations.results` returns them."""
    revoked: frozenset[PolicyVersion]


async def overview(bus: Bus) -> Overview:
    """Return what the live view shows, in one round trip."""
    run, counts, evaluations, revoked = await bus.ask_all(
        ("HGETALL", RUN), ("HGETALL", COUNTS), ("HGETALL", EVALUATIONS), ("SMEMBERS", REVOKED)
    )
    fenced = frozenset(PolicyVersion(int(version)) for version in revoked)
    return Overview(read_status(run), read_counts(counts), run.get(b"guards", b""), evaluations, fenced)
