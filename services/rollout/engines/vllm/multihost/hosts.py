"""The hosts of an engine: numbers, rendezvous and shared secret.

All start vLLM with the same arguments except their number. Imports neither vLLM nor torch.
"""

import dataclasses
from pathlib import Path
from typing import Any

from penstock.shared.files.secret_file import read_secret
from penstock.shared.settings.rollout import RolloutSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Hosts:
    """Host ``node`` of ``nodes``, with address ``own``; they meet at ``rendezvous`` (host:port)."""

    nodes: int
    node: int
    rendezvous: str
    own: str
    secret_file: Path

    @property
    def arguments(self) -> dict[str, Any]:
        """Their AsyncEngineArgs."""
        address, _, port = self.rendezvous.rpartition(":")
        return {
            "distributed_executor_backend": "mp",
            "nnodes": self.nodes,
            "node_rank": self.node,
            "master_addr": address,
            "master_port": int(port),
        }


def hosts_of(rollout: RolloutSettings, own: str) -> Hosts | None:
    if rollout.nodes == 1 or rollout.secret_file is None:
        return None
    secret_of(rollout.secret_file)
    return Hosts(rollout.nodes, rollout.node, rollout.rendezvous, own, rollout.secret_file.absolute())


def secret_of(file: Path) -> bytes:
    return read_secret(file, "rollout.secret_file, the same on every host of the replica")
