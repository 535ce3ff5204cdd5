"""Ranks wait for each other in host memory: a collective of NCCL would keep a kernel running on a GPU that others use."""

from pathlib import Path

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
