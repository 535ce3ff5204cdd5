"""Ranks wait for each other in host memory: a collective of NCCL would keep a kernel running on a GPU that others use."""

import os
import subprocess
import sys
from pathlib import Path

from penstock.services.trainer.launcher import RANKS_STORE
from tests.conftest import PATIENCE_S
from tests.support import forge


def test_commands_and_decisions_of_ranks_need_no_collective_on_their_devices(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        ranks = [
            forge.start("tests.support.fake_ranks", [tmp_path / "store", rank], output, GLOO_SOCKET_IFNAME="lo")
            for rank in range(2)
        ]
    try:
        codes = [rank.wait(PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], log.read_text()


_STARTED = """
import os, sys
from penstock.services.trainer.rank_group import start_ranks, writers_group
start_ranks("cpu")
print("started", flush=True)
sys.stdin.readline()
os._exit(0 if int(os.environ["RANK"]) or writers_group().size() == 2 else 1)
"""


def test_the_group_that_writes_checkpoints_is_there_before_a_host_can_die(tmp_path: Path) -> None:
    hosts = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {RANKS_STORE: str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-c", _STARTED]
        pipe = subprocess.PIPE
        hosts.append(subprocess.Popen(command, env={**os.environ, **own}, text=True, stdin=pipe, stdout=pipe))
    try:
        for host in hosts:
            assert host.stdout is not None
            assert host.stdout.readline() == "started\n"
        for host in reversed(hosts):  # the second is gone when the first asks for the group
            host.communicate("\n", PATIENCE_S)
            assert host.returncode == 0
    finally:
        for host in hosts:
            host.kill()
