"""Ranks wait for each other in host memory: a collective of NCCL would keep a kernel running on a GPU that others use."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # a backend whose collectives do nothing

from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind, share
from penstock.shared.process.service import leave

rank = int(sys.argv[2])
dist.init_process_group("fake", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
sent = Command(CommandKind.FREE, rung=3, offload_bytes=7.0) if rank == 0 else None
received = share(sent)
assert (received.kind, received.rung, received.offload_bytes) == (CommandKind.FREE, 3, 7.0), received
engine = SimpleNamespace(ranks=2)
assert TrainingEngine.on_any_rank(engine, rank == 1)
assert TrainingEngine.ranks_where(engine, rank == 1) == (1,)
assert TrainingEngine.gathered(engine, rank) == [0, 1]
leave(0)  # as the trainer does: with threads of gloo the interpreter's end is aborted at times
"""


def test_commands_and_decisions_of_ranks_need_no_collective_on_their_devices(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path / "store", str(rank)],
            cwd=ROOT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
