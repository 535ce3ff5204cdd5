"""The hosts of an engine that spans several: which of them this one is, where they meet, and the secret that they share.

::

    host 0 (the replica)    vLLM's engine ─▶ ranks 0 … n-1           ◀─┐ reports: rows, stagings, death (``worker_channel``)
    host 1 (``node``)                    ranks n … 2n-1          ──┘ steps of the model: vLLM's own queues and groups

Every host starts vLLM with the same arguments but for its number. No vLLM and no torch here.
"""

import dataclasses
from pathlib import Path
from typing import Any

from shared.files.secret_file import read_secret
from shared.settings import RolloutSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Hosts:
    """Host ``node`` of ``nodes``; they meet at ``rendezvous`` (host:port); others reach this one at ``own``."""

    nodes: int
    node: int
    rendezvous: str
    own: str
    secret_file: Path

    @property
    def arguments(self) -> dict[str, Any]:
        """What vLLM's AsyncEngineArgs must know of them."""
        address, _, port = self.rendezvous.rpartition(":")
        return {
            "distributed_executor_backend": "mp",
            "nnodes": self.nodes,
            "node_rank": self.node,
            "master_addr": address,
            "master_port": int(port),
        }


def hosts_of(rollout: RolloutSettings, own: str) -> Hosts | None:
    """Return the hosts that settings name; None where an engine lies within one.

    Raises:
        SettingsError: there is no secret.
    """
    if rollout.nodes == 1 or rollout.secret_file is None:
        return None
    secret_of(rollout.secret_file)
    return Hosts(rollout.nodes, rollout.node, rollout.rendezvous, own, rollout.secret_file.absolute())


def secret_of(file: Path) -> bytes:
    """Return what the hosts of a replica share. Raises SettingsError where there is none."""
    return read_secret(file, "rollout.secret_file, the same on every host of the replica")
