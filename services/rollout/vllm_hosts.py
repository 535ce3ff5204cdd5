"""The hosts of an engine that spans several: which of them this one is, where they meet, and the secret that they share.

::

    host 0 (the replica)    vLLM's engine ─▶ ranks 0 … n-1           ◀─┐ reports: rows, stagings, death (``engine_reports``)
    host 1 (``vllm_node``)                    ranks n … 2n-1          ──┘ steps of the model: vLLM's own queues and groups

Every host starts vLLM with the same arguments but for its number. No vLLM and no torch here.
"""

import dataclasses
from pathlib import Path
from typing import Any

from shared.errors import SettingsError
from shared.settings import RolloutSettings

_LEAST_BYTES = 16


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
    read_secret(rollout.secret_file)
    return Hosts(rollout.nodes, rollout.node, rollout.rendezvous, own, rollout.secret_file.absolute())


def read_secret(file: Path) -> bytes:
    """Return the secret in ``file``: its first line.

    Raises:
        SettingsError: there is none, or it is too short to be one.
    """
    try:
        found = file.read_bytes().partition(b"\n")[0].strip()
    except OSError as error:
        raise SettingsError(f"expected a secret in {file}, found: {error}: change rollout.secret_file") from error
    if len(found) < _LEAST_BYTES:
        raise SettingsError(
            f"expected a secret of at least {_LEAST_BYTES} characters in {file}, found {len(found)}: write a longer one, "
            "the same on every host of the replica"
        )
    return found
