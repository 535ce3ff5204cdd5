"""Scenes of ranks that share experts and compute long rows together, for ``tests/trainer/model/test_expert_rows.py``;
started once by the launcher. Rank 0 writes the results.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.services.trainer.model import experts
from penstock.services.trainer.model.engine import place
from penstock.services.trainer.model.layers import ulysses
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.self_test import self_test
from penstock.shared.errors import SettingsError
from tests.support import expert_ranks, tiny
from tests.support.expert_ranks import (
    ACTOR_CRITIC,
    RECURRENT,
    by_others,
    compared,
    imbalance,
    opened,
    passes_of,
    published,
    replayed,
    resumed,
    self_tested,
    settings,
    steps,
    updated,
)

FAMILIES = sorted({*experts.PROVEN, "gpt_oss+swa(short)", "mixtral+swa(short)"})
GROUPS = {2: ((2, 2),), 4: ((2, 2), (4, 2), (2, 4))}
"""By ranks: how many of them share experts, and how many compute a long row together."""
STAGES = {(2, 2, 2): (1, 2, 3), (4, 2, 2): (1, 3), (4, 4, 2): (2, 3), (4, 2, 4): (1, 3)}
"""ZeRO stages of steps, by ranks and these groups: gradients of 1 and 2 are reduced by the same code."""
ALGORITHM = {2: (1, 2, 3), 4: (1, 3)}
"""The same of steps of the algorithm; at stage 2 in the host's memory."""
CAPS = {1: 24, 2: 9, 4: 5}
"""Tokens of a pass by the ranks of a row: some samples are longer, others are not."""


def of_row(together: int, **trainer: Any) -> dict[str, Any]:
    return {"sequence_parallel": together, "micro_batch_tokens": CAPS[together], **trainer}


def started(name: str, parallel: int, together: int) -> dict[str, float] | str:
    """Return how far logprobs and gradients of rows in parts are from transformers', or why they are refused."""
    of = settings(parallel, trainer=of_row(together))
    policy = Policy(expert_ranks.family(name)).train()
    place(policy, of, "cpu")
    try:
        policy.trunk.check_shards(together)
    except SettingsError as error:
        return str(error)
    return dataclasses.asdict(self_test._best(policy, 0, ranks=together).gap)


def of_algorithm(parallel: int, together: int, stage: int, **trainer: Any) -> dict[str, Any]:
    """Return two steps, two with a critic, and one with routes."""
    trainer = of_row(together, **trainer)
    live, critic = (settings(parallel, stage, trainer=trainer, algorithm=algorithm) for algorithm in ({}, ACTOR_CRITIC))
    return {
        "live": steps(live, tiny.mixture(0).requires_grad_(True)),
        "critic": steps(critic, tiny.mixture(0).requires_grad_(True)),
        "replayed": replayed(parallel, stage, trainer=trainer),
    }


def adapted(parallel: int, together: int, stage: int) -> dict[str, Any]:
    return updated(opened(settings(parallel, stage, rank=4, trainer=of_row(together)), 1))


def order() -> list[list[bool]]:
    """Return by rank which passes are of rows in parts."""
    own = [each.shard is not None for each in passes_of(settings(2, trainer=of_row(2)).trainer)]
    of_ranks: list[list[bool]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def of_steps(ranks: int) -> dict[str, Any]:
    """Return steps of groups of ranks and of the algorithm, on two ranks of families, too."""
    scenes: dict[str, Any] = {}
    for name in sorted(experts.PROVEN - RECURRENT) if ranks == 2 else ():
        scenes[name] = compared(name, 3, **of_row(2))
    for parallel, together in GROUPS[ranks]:
        for stage in STAGES[ranks, parallel, together]:
            scenes[f"{parallel} by {together} {stage}"] = compared("qwen3_moe", stage, parallel, **of_row(together))
    scenes["whole"] = of_algorithm(1, 1, 1)
    scenes["divided 1"] = of_algorithm(2, 2, 1)
    if 2 in ALGORITHM[ranks]:
        scenes["divided 2"] = of_algorithm(2, 2, 2, offload="optimizer")
    scenes["divided 3"] = of_algorithm(ranks, 2, 3, gradient_checkpointing=True)
    scenes["adapters"] = [adapted(1, 1, 1), adapted(2, 2, 1), adapted(2, 2, 3)]
    return scenes


def of_checkpoints(ranks: int, folder: Path) -> dict[str, Any]:
    scenes: dict[str, Any] = {}
    for stage in (1, 3):
        of = settings(2, stage, trainer=of_row(2))
        scenes[f"resumed {stage}"] = resumed(of, folder / f"resumed-{stage}")
        if ranks == 2:
            apart = settings(1, stage, trainer=of_row(1))
            scenes[f"by whole rows {stage}"] = by_others(apart, folder / f"resumed-{stage}")
            scenes[f"of four {stage}"] = by_others(of, folder.parent / "four" / f"resumed-{stage}")
    return scenes


def of_starts(ranks: int) -> dict[str, Any]:
    """Return what the self-test says, of groups of ranks and wrong experts, on two ranks of families, too."""
    scenes: dict[str, Any] = {f"started {name}": started(name, 2, 2) for name in FAMILIES if ranks == 2}
    for parallel, together in GROUPS[ranks]:
        scenes[f"started {parallel} by {together}"] = started("qwen3_moe", parallel, together)
    for stage in (1, 3) if ranks == 2 else ():
        of = settings(2, stage, trainer=of_row(2))
        scenes[f"self-test {stage}"] = [self_tested(of, broken=broken) for broken in (False, True)]
    return scenes


def scenes_of(folder: Path) -> dict[str, Any]:
    ranks = dist.get_world_size()
    for together in (2, ranks):
        ulysses.group_of(together)
    few = {"order": order(), "imbalance": imbalance(2), "published": published(settings(2, 3, trainer=of_row(2)))}
    return few | of_starts(ranks) | of_steps(ranks) | of_checkpoints(ranks, folder)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    expert_ranks.main(scenes_of)
