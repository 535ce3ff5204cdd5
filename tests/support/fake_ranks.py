"""A rank for ``tests/trainer/test_rank_group.py``: its device's backend does nothing, so it can wait in host memory alone.

python -m tests.support.fake_ranks STORE RANK
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (a backend whose collectives do nothing)

from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind, share
from penstock.shared.process.service import leave


def main(store: str, rank: int) -> None:
    dist.init_process_group("fake", store=dist.FileStore(store, 2), rank=rank, world_size=2)  # type: ignore[attr-defined]
    sent = Command(CommandKind.FREE, rung=3, offload_bytes=7.0) if rank == 0 else None
    received = share(sent)
    assert (received.kind, received.rung, received.offload_bytes) == (CommandKind.FREE, 3, 7.0), received
    engine: Any = SimpleNamespace(ranks=2)
    assert TrainingEngine.on_any_rank(engine, rank == 1)
    assert TrainingEngine.ranks_where(engine, rank == 1) == (1,)
    assert TrainingEngine.gathered(engine, rank) == [0, 1]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    leave(0)  # as the trainer does: with threads of gloo the interpreter's end is aborted at times
