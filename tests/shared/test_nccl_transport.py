"""Laws of NCCL's transport, read from lines that NCCL logged on real clusters."""

import os
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from penstock.shared.errors import SettingsError
from penstock.shared.peers import nccl_transport

SOCKETS = """
node-2:919:1150 [0] NCCL INFO NET/IB : No device found.
node-2:919:1150 [0] NCCL INFO Using network Socket
node-2:919:1150 [0] NCCL INFO Channel 03/0 : 8[0] -> 15[7] via P2P/IPC/read
node-2:926:1151 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
"""
INFINIBAND = """
10-90-43-152:120890:121560 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA
host:984:1257 [4] NCCL INFO Channel 06/0 : 36[4] -> 20[4] [send] via NET/IBext_v8/3
host:984:1257 [4] NCCL INFO Channel 06/0 : 36[4] -> 37[5] via SHM/direct/direct
"""
LIBFABRIC = "host:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA"


@pytest.mark.parametrize(
    ("log", "transports"),
    [
        (SOCKETS, {"socket", "nvlink or pcie"}),
        (INFINIBAND, {"rdma", "shared memory"}),
        (LIBFABRIC, {"rdma"}),
        ("host:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/FasTrak/0", {"FasTrak"}),
        ("host:1:2 [0] NCCL INFO Channel 00/02 :    0   1   2", set()),
    ],
)
def test_the_transport_of_each_connection_is_read(log: str, transports: set[str]) -> None:
    assert nccl_transport.chosen(log.splitlines()) == transports


def test_sockets_are_refused_where_rdma_is_required_and_what_stays_within_a_machine_is_not() -> None:
    nccl_transport.require_rdma(nccl_transport.chosen(INFINIBAND.splitlines()))
    with pytest.raises(SettingsError) as refused:
        nccl_transport.require_rdma(nccl_transport.chosen(SOCKETS.splitlines()))
    assert str(refused.value) == (
        "expected NCCL to use RDMA, because fabric.require is 'rdma', found socket: check the RDMA devices (rdma.resource) and the memlock "
        "limit of the pod with `python -m penstock.shared.preflight --rdma`, or set fabric.require to 'any'"
    )


def test_this_processs_log_is_read_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    nccl_transport.record(tmp_path)
    assert os.environ["NCCL_DEBUG_FILE"] == str(tmp_path / "nccl.%h.%p")
    (tmp_path / f"nccl.node-2.{os.getpid()}").write_text(SOCKETS)
    (tmp_path / "nccl.node-2.1").write_text(INFINIBAND)
    assert nccl_transport.recorded() == {"socket", "nvlink or pcie"}
    assert REGISTRY.get_sample_value("penstock_nccl_transport", {"transport": "socket"}) == 1
