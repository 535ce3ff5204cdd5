"""A trainer whose ranks serve shares of the weights, for ``tests/trainer/test_shares.py``; started by the launcher.

    python -m tests.support.sharing_ranks FOLDER 1,2,3,3-merged [held]

For each ZeRO stage, at last with adapters that are merged: three steps, the third version's record in FOLDER/zero-N.json; then it serves until it is killed.
``held``: rank 1 serves as if its buckets had not arrived.
"""

import dataclasses
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.services.trainer.loop import Trainer
from penstock.services.trainer.rank0.artifacts import Artifacts, Rank0Artifacts
from penstock.services.trainer.rank0.mailbox.queues import NoMailbox
from penstock.services.trainer.rank0.mailbox.results import StepMade
from penstock.services.trainer.rank0.publication import Publication
from penstock.services.trainer.rank_group import start_ranks
from tests.support import trainer_ranks, weights
from tests.support.weights_players import fingerprint
from tests.trainer.algorithm import test_update

VERSION = 3


def publish(name: str, folder: Path, *, held: bool) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lora = trainer_ranks.LORA if name.endswith("merged") else {}
    of = trainer_ranks.settings(int(name[0]), ranks, folder, lora=lora)
    sharded = of.weights.model_copy(
        update={"snapshots": "sharded", "lora": "merged", "folder": folder / f"weights-{name}"}
    )
    of = of.model_copy(update={"weights": sharded})
    publication = Publication(of, "127.0.0.1", weights.secret) if rank == 0 else Publication(of, "127.0.0.1")
    artifacts = Rank0Artifacts(of, publication) if rank == 0 else Artifacts(of, publication)
    trained = trainer_ranks.Rank(of)
    trainer, data = Trainer(trained.engine, of, NoMailbox(), artifacts), tuple(test_update.batch())
    for version in range(1, VERSION + 1):
        made = trainer.execute(trainer_ranks.train_command(data, version))
    assert isinstance(made, StepMade)
    whole = trained.weights()
    if held and rank == 1:
        assert publication._offered is not None
        assert publication._offered.header is not None
        publication._offered.begin(publication._offered.header)
    pids = trained.engine.gathered(os.getpid())
    if made.published.weights is None:
        return {}
    snapshots = [
        max(sample.components.get("snapshots", 0.0) for sample in samples if sample.phase == "snapshot")
        for samples in made.samples
    ]
    nbytes = sum(tensor.numel() * 4 for tensor in whole.values())
    where = dataclasses.asdict(made.published.weights)
    return {
        "where": where, "fingerprint": fingerprint(whole.items()), "snapshots": snapshots, "whole": nbytes, "pids": pids,
    }  # fmt: skip


def main(folder: Path, stages: str, *, held: bool) -> None:
    start_ranks("cpu")
    torch.set_num_threads(1)
    for stage in stages.split(","):
        published = publish(stage, folder, held=held)
        if published:
            (folder / f".zero-{stage}.json").write_text(json.dumps(published))
            (folder / f".zero-{stage}.json").rename(folder / f"zero-{stage}.json")
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], held="held" in sys.argv)
