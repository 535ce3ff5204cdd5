"""Laws of the checks before a run: each planted fault gives one sentence with its fix."""

import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.up.prepare import _check_bus
from penstock.shared.errors import SettingsError
from penstock.shared.preflight import cluster, node
from penstock.shared.preflight.finding import Finding
from tests.chaos.rewinds import told
from tests.chaos.run import TcpServer, answers
from tests.conftest import PATIENCE_S, Server, need, until
from tests.support.chart import ROOT

CUDA = """
int cuInit(unsigned flags) { return %d; }
int cuDriverGetVersion(int *version) { *version = %d; return 0; }
"""


def library(folder: Path, version: int, status: int = 0) -> str:
    """Compile a driver library that supports CUDA ``version``."""
    source, made = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(CUDA % (status, version))
    subprocess.run([need("cc", "gcc"), "-shared", "-fPIC", "-o", made, source], check=True)
    return str(made)


def sentence(*words: str, inside: tuple[str, ...] = ()) -> str:
    """Return what ``python -m penstock.shared.preflight`` prints; it must fail."""
    command = [*inside, sys.executable, "-m", "penstock.shared.preflight", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip()


def test_a_node_without_a_driver_is_refused() -> None:
    assert node.driver("libcuda-that-is-missing.so.1").sentence == (
        "expected NVIDIA's driver library libcuda-that-is-missing.so.1, found neither it nor a GPU: install the "
        'driver, or train without a GPU (run.device = "cpu"); in a cluster, request GPUs (gpu.count), and set runtimeClassName to nvidia '
        "where it needs that"
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_driver_that_is_too_old_or_does_not_start_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "broken").mkdir()
    assert node.driver(library(tmp_path, 12040), 13).sentence == (
        "expected a driver for CUDA 13 (version 580 or newer), found one for CUDA 12.4: update the node's NVIDIA driver"
    )
    assert node.driver(library(tmp_path / "new", 13000), 13).sentence == "the driver supports CUDA 13.0"
    assert node.driver(library(tmp_path / "broken", 13000, 100), 13).sentence == (
        "expected a driver that starts (cuInit), found CUDA error 100: check nvidia-smi on the node, and that the pod requests GPUs "
        "(gpu.count)"
    )


def test_a_low_limit_of_locked_memory_is_refused_without_the_capability() -> None:
    need("setpriv", "util-linux")
    limited = ("prlimit", "--memlock=1048576:1048576")
    unprivileged = () if os.getuid() else ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
    lines = sentence("--rdma", inside=(*limited, *unprivileged)).splitlines()
    assert lines[-1] == (
        "memlock: expected an unlimited memlock limit, because RDMA locks memory, found 1 MiB: set LimitMEMLOCK=infinity for the node's "
        "containerd, or run the role as root with the capability IPC_LOCK"
    )


def test_no_limit_of_locked_memory_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert node.locked_memory().ok


def test_a_pod_without_rdma_devices_or_with_little_shared_memory_is_refused(tmp_path: Path) -> None:
    assert node.rdma(str(tmp_path), "libc.so.6").sentence == (
        f"expected an RDMA device in {tmp_path}, found none: set rdma.resource to what the fabric's device plugin offers"
    )
    assert node.rdma(library="libmissing.so.1").sentence == (
        "expected the library libmissing.so.1, without which NCCL takes sockets, found none: use an image of deploy/docker, or install "
        "rdma-core"
    )
    (tmp_path / "mlx5_0").mkdir()
    assert node.rdma(str(tmp_path), "libc.so.6").sentence == "RDMA devices: mlx5_0"
    assert node.shared_memory(1 << 60).sentence.endswith("raise the role's shm")
    assert node.shared_memory(1).ok


async def test_a_bus_without_a_memory_limit_is_refused(own_server: Server) -> None:
    findings = {finding.check: finding for finding in await cluster.bus(own_server.url, "r")}
    assert findings["bus"].ok
    assert findings["clock"].ok
    assert findings["maxmemory"].sentence == (
        "expected a memory limit of the bus, found maxmemory 0: set maxmemory to about 60 % of the server's memory: without it a full bus "
        "is killed instead of pausing admission"
    )


@pytest.mark.debian
async def test_a_replicated_bus_that_takes_writes_while_no_replica_follows_is_refused_unless_it_cannot_be_configured(
    tmp_path: Path,
) -> None:
    binary = need("redis-server", "redis-server")
    primary, replica = TcpServer(tmp_path / "primary", binary), TcpServer(tmp_path / "replica", binary)
    for server in (primary, replica):
        server.start()
    try:
        for server in (primary, replica):
            await until(lambda server=server: answers(server.port), timeout_s=PATIENCE_S)
        assert (await _of_replicas(primary.url)).ok, "it has none"
        await told(replica.port, "REPLICAOF", "127.0.0.1", str(primary.port))
        await until(lambda: _is_refused(primary.url), timeout_s=PATIENCE_S)
        refusal = (await _of_replicas(primary.url)).sentence
        assert refusal.startswith(
            "expected min-replicas-to-write of at least 1 on a bus with replicas or a Sentinel, found 0"
        )
        with pytest.raises(SettingsError, match="min-replicas-max-lag 2"):
            await _check_bus(primary.url)
        await told(primary.port, "ACL", "SETUSER", "managed", "on", ">word", "~*", "&*", "+@all", "-config")
        managed = await _of_replicas(primary.url.replace("redis://", "redis://managed:word@"))
        assert managed.ok
        assert "where the provider does not allow it" in managed.sentence
        await told(primary.port, "CONFIG", "SET", "min-replicas-to-write", "1")
        assert (await _of_replicas(primary.url)).ok
    finally:
        for server in (primary, replica):
            server.kill()


async def _of_replicas(url: str) -> Finding:
    return next(finding for finding in await cluster.bus(url, "r") if finding.check == "replicas")


async def _is_refused(url: str) -> bool:
    return not (await _of_replicas(url)).ok


async def test_a_bus_that_is_away_is_reported(tmp_path: Path) -> None:
    (finding,) = await cluster.bus(f"unix://{tmp_path}/missing", "r", wait_s=0.1)
    assert not finding.ok


def test_clocks_that_differ_are_refused() -> None:
    assert cluster.clock(100.0, 103.0).ok
    assert cluster.clock(100.0, 160.0).sentence == (
        "expected a clock within 5 s of the bus's, found 60 s: synchronise the nodes' clocks (chrony or systemd-timesyncd)"
    )


def test_a_file_of_another_node_must_be_visible(tmp_path: Path) -> None:
    assert cluster.leave(tmp_path / "mark").ok
    assert cluster.seen(tmp_path / "mark").ok
    missing = tmp_path / "elsewhere" / "mark"
    assert cluster.seen(missing, wait_s=0.0).sentence == (
        f"expected {missing}, which another pod wrote, found no such file: use a storage class with ReadWriteMany for storage.runs, or "
        "checkpoints.s3"
    )


BLOCKED = """
ip link set lo up
nft add table inet block
nft add chain inet block output '{ type filter hook output priority 0; }'
nft add rule inet block output udp dport 53 drop
mount --bind "$1" /etc/resolv.conf
exec "$2" -m penstock.shared.preflight --name bus.research.svc
"""


def test_blocked_name_servers_are_found(tmp_path: Path) -> None:
    for tool, package in (("ip", "iproute2"), ("nft", "nftables"), ("unshare", "util-linux")):
        need(tool, package)
    if os.getuid():
        pytest.skip("needs root for network namespaces")
    servers = tmp_path / "resolv.conf"
    servers.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    inside = ("unshare", "--net", "--mount", "sh", "-ec", BLOCKED, "sh", str(servers), sys.executable)
    done = subprocess.run(inside, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1, done.stderr
    assert done.stderr == (
        "dns: expected DNS to know bus.research.svc, found [Errno -3] Temporary failure in name resolution: allow the cluster's name "
        "servers in networkPolicy.dns, and check that the Service exists\n"
    )


def test_an_open_connection_that_policies_must_close_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert cluster.closed("127.0.0.1", port).sentence == (
            f"expected no connection from here to 127.0.0.1:{port}, found one: use a network plugin that enforces NetworkPolicies, or set "
            "networkPolicy.enabled to false and isolate the namespace yourself"
        )
    assert cluster.closed("127.0.0.1", port).ok
