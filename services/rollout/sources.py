"""From whom a replica pulls a version: the order in which to try. Pure functions over what the bus says.

::

    parent in the coordinator's tree ─▶ trainer ─▶ a file that the trainer writes on request ─▶ the record's own file
    not in the tree (joined later), or the tree's parent failed before: peers that hold the version ─▶ trainer ─▶ …

By file only, where no process serves the version.
"""

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Literal

from shared.bus.messages import PolicyRecord, PolicyUpdate
from shared.bus.stores.heartbeats import Heartbeat

Kind = Literal["peer", "trainer", "requested_file", "file"]
PEERS = 3
"""So many peers, drawn by lot, are tried before the trainer is."""


@dataclasses.dataclass(frozen=True, slots=True)
class PullAttempt:
    """One place to try. ``address`` is ``host:port``; empty for ``file``, which the record tells."""

    kind: Kind
    address: str = ""

    @property
    def label(self) -> str:
        """``trainer``, ``peer`` or ``file``, for metrics."""
        return "file" if self.kind == "requested_file" else self.kind


def attempts(record: PolicyRecord, told: Sequence[str], own_address: str) -> list[PullAttempt]:
    """Return the places to try for ``record``, in order.

    Args:
        told: addresses of peers to try before the trainer, which may itself be among them.
    """
    found: list[PullAttempt] = []
    if record.source:
        peers = [address for address in dict.fromkeys(told) if address not in (own_address, record.source)]
        found += [PullAttempt("peer", address) for address in peers]
        found += [PullAttempt("trainer", record.source), PullAttempt("requested_file", record.source)]
    if record.location:
        found.append(PullAttempt("file"))
    return found


def holders(beats: Iterable[Heartbeat], update: PolicyUpdate, replica: str, lot: random.Random) -> list[str]:
    """Return the addresses of up to ``PEERS`` other replicas that say they hold ``update``'s version, in random order."""
    found = [
        beat.source
        for beat in beats
        if beat.service == "rollout" and beat.source and beat.replica != replica
        if beat.version == update.record.version
    ]
    return lot.sample(found, min(PEERS, len(found)))
