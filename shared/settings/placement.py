"""Which processes share a device: ``[placement]``."""

import bisect
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from penstock.shared.settings.section import Section, shown

if TYPE_CHECKING:
    from penstock.shared.settings.root import Settings

RUNGS = (0, 1, 2, 3, 4)
"""Rungs of the ladder."""
REPLICA_RUNG = 2
"""The highest rung at which a replica frees memory; above it the trainer does, too."""
USABLE_IN_TURNS = 0.9
"""Share of a shared device's memory that components may use in each phase; allocators and contexts take the rest."""
OPTIMIZER_RUNG = 3
"""At which the trainer moves optimizer states: all if the rung is forced, else as many as generation needs room for."""


class PlacementSettings(Section):
    """Which processes share a device (docs/placement.md)."""

    mode: Literal["separate", "shared"] = Field(default="separate")
    """`separate`: trainer and replicas have devices of their own. `shared`: trainer rank i and replica i use the same
    device in turn, and models of the reward service that of rank 0, unless they have their own."""
    rung: Literal["auto", 0, 1, 2, 3, 4] = Field(default="auto")
    """What is freed at a switch, from nothing (0) to the trainer's weights (4) (docs/placement.md). `auto`: the lowest
    that fits into memory; vLLM on a CPU supports only 0."""


def moved_and_staying(sizes: Sequence[float], needed_bytes: float) -> tuple[list[int], list[int]]:
    """Return the places in ``sizes`` of storages that move at :data:`OPTIMIZER_RUNG`, and of the others: the smallest move,
    until they have ``needed_bytes``.
    """
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    totals = list(itertools.accumulate((sizes[place] for place in order), initial=0))
    count = bisect.bisect_left(totals, needed_bytes)
    return order[:count], order[count:]


def check_placement(settings: "Settings") -> None:
    """Raise ValueError where the placement is not supported."""
    placement, rollout, trainer = settings.placement, settings.rollout, settings.trainer
    if placement.mode == "separate":
        return
    if settings.run.deterministic == "run" and placement.rung != 0:
        raise ValueError(
            'expected placement.rung = 0 with run.deterministic = "run", as a KV cache that is computed again rounds differently, '
            f"found {shown(placement.rung)}: change one of them"
        )
    if rollout.engine != "auto":
        check_shared_engine(settings, rollout.engine, on_gpu=settings.run.device != "cpu")
    each = rollout.vllm.tensor_parallel_size
    if trainer.ranks % each:
        raise ValueError(
            f"expected trainer.ranks to be a multiple of rollout.vllm.tensor_parallel_size = {each} with placement.mode = "
            f"{shown(placement.mode)}, where a replica shares the devices of {each} ranks, found {trainer.ranks}: change one of them"
        )
    pair = "rank i and replica i share device i" if each == 1 else f"each replica shares the devices of {each} ranks"
    for key, value, expected, reason in (
        ("rollout.replicas", rollout.replicas, trainer.ranks // each, pair),
        ("rollout.gpus", list(rollout.gpus or trainer.gpus), list(trainer.gpus), "the replicas use the trainer's GPUs"),
        ("rollout.nodes", rollout.nodes, 1, "it is for one host"),
        ("trainer.nodes", trainer.nodes, 1, "it is for one host"),
        ("weights.update", settings.weights.update, "inflight", "a freed replica continues with newer weights"),
    ):
        if value != expected:
            raise ValueError(
                f"expected {key} = {shown(expected)} with placement.mode = {shown(placement.mode)}, where {reason}, found "
                f"{shown(value)}: change one of them"
            )
    if settings.scores_in_turns and settings.reward.replicas != 1:
        raise ValueError(
            'expected reward.replicas = 1 with placement.mode = "shared" and models in the reward service, which take turns on '
            f"the trainer's device, found {settings.reward.replicas}: change it, or give them another device with "
            "reward.models.device or reward.gpus"
        )


def check_shared_engine(settings: "Settings", engine: str, *, on_gpu: bool) -> None:
    """Raise ValueError where replicas of ``engine`` cannot share a device, a GPU if ``on_gpu``."""
    mode = shown(settings.placement.mode)
    if settings.placement.mode == "separate":
        return
    if engine == "scripted":
        raise ValueError(
            f'expected the engine "vllm" or "transformers" with placement.mode = {mode}, found "scripted", which uses no device: '
            'change rollout.engine, or set placement.mode = "separate"'
        )
    if engine == "vllm" and settings.weights.shadow == "full":
        raise ValueError(
            f'expected weights.shadow = "auto" or "bucketed" with placement.mode = {mode}, found "full": weights are replaced while '
            "generation is paused, and a second copy would take the trainer's memory; change weights.shadow"
        )
    if engine == "vllm" and not on_gpu and settings.placement.rung != 0:
        raise ValueError(
            f"expected placement.rung = 0 for vLLM on a CPU, found {shown(settings.placement.rung)}: its sleep mode, which frees "
            'memory, needs a GPU; set placement.rung = 0 or rollout.engine = "transformers"'
        )
