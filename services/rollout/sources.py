"""The order in which to try sources of a version, from the bus's records.

::

    parent in the coordinator's tree ─▶ trainer ─▶ a file that the trainer writes on request ─▶ the record's own file
    not in the tree (joined later), or the tree's parent failed before: peers that hold the version ─▶ trainer ─▶ …

If no process serves the version, only the file is tried.
"""

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Literal

from penstock.shared.bus.messages import PolicyRecord, PolicyUpdate
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat

SourceKind = Literal["peer", "trainer", "requested_file", "file"]
PEERS = 3
"""Random peers to try before the trainer."""


@dataclasses.dataclass(frozen=True, slots=True)
class PullAttempt:
    """A source; ``address`` is ``host:port``, or empty for ``file`` (see the record)."""

    kind: SourceKind
    address: str = ""

    @property
    def label(self) -> str:
        """``trainer``, ``peer`` or ``file``, for metrics."""
        return "file" if self.kind == "requested_file" else self.kind


def attempts(record: PolicyRecord, told: Sequence[str], own_address: str) -> list[PullAttempt]:
    """Return the sources for ``record``, in order; ``told`` are peers to try first, possibly with the trainer."""
    places: list[PullAttempt] = []
    if record.source:
        peers = [address for address in dict.fromkeys(told) if address not in (own_address, record.source)]
        places += [PullAttempt("peer", address) for address in peers]
        places += [PullAttempt("trainer", record.source), PullAttempt("requested_file", record.source)]
    if record.location:
        places.append(PullAttempt("file"))
    return places


def holders(beats: Iterable[Heartbeat], update: PolicyUpdate, replica: str, lot: random.Random) -> list[str]:
    """Return up to ``PEERS`` random addresses of other replicas that report ``update``'s version and keep a copy of it."""
    addresses = [
        beat.source
        for beat in beats
        if beat.service == "rollout" and beat.source and beat.replica != replica
        if beat.version == update.record.version
    ]
    return lot.sample(addresses, min(PEERS, len(addresses)))
