"""Which transport NCCL chose, from its own log.

NCCL falls back to sockets without an error if RDMA's library, a device or locked memory is missing. :func:`record` makes
it log to a file of this process; after the first collective :func:`chosen` reads the transports of its connections.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Gauge

from penstock.shared.errors import SettingsError
from penstock.shared.files import temporary

TRANSPORT = Gauge("penstock_nccl_transport", "1 for a transport of this process's NCCL connections.", ["transport"])
_CONNECTION = re.compile(r"Channel \d+(?:/\d+)? : .* via (?P<way>P2P|SHM|NET)(?:/(?P<network>[\w .-]+?)(?:/|\(|$))?")
_NETWORKS = {
    "IB": "rdma",
    "IBext": "rdma",
    "IBext_v8": "rdma",
    "AWS Libfabric": "rdma",
    "Libfabric": "rdma",
    "Socket": "socket",
}


def record(folder: Path | None = None) -> None:
    """Make NCCL log its connections to a file, unless the environment names one; before the first communicator."""
    if "NCCL_DEBUG_FILE" not in os.environ:
        made = folder or temporary.make("nccl")
        os.environ["NCCL_DEBUG_FILE"] = str(made / "nccl.%h.%p")
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")


def recorded(pid: int | None = None) -> set[str]:
    """Return the transports in this process's log (or that of ``pid``), and export them."""
    place = Path(os.environ["NCCL_DEBUG_FILE"])
    files = place.parent.glob(place.name.replace("%h", "*").replace("%p", str(pid or os.getpid())))
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    transports = chosen(lines)
    for transport in transports:
        TRANSPORT.labels(transport).set(1)
    return transports


def chosen(lines: Iterable[str]) -> set[str]:
    """Return the transports of logged connections: "nvlink or pcie", "shared memory", "rdma", "socket", or a network's name.

    >>> sorted(chosen(["a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"]))
    ['socket']
    """
    transports = set()
    for line in lines:
        if match := _CONNECTION.search(line):
            way, network = match["way"], match["network"] or ""
            within = {"P2P": "nvlink or pcie", "SHM": "shared memory"}
            transports.add(within.get(way) or _NETWORKS.get(network, network or "unknown"))
    return transports


def require_rdma(transports: set[str]) -> None:
    """Refuse a connection between pods that is not RDMA. Raises SettingsError: NCCL chose another network."""
    others = transports - {"nvlink or pcie", "shared memory", "rdma"}
    if others:
        raise SettingsError(
            f"expected NCCL to use RDMA, because fabric.require is 'rdma', found {', '.join(sorted(others))}: check the RDMA devices "
            "(rdma.resource) and the memlock limit of the pod with `python -m penstock.shared.preflight --rdma`, or set fabric.require to 'any'"
        )
