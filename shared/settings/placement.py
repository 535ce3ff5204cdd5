"""Which processes share a device: ``[placement]``."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from shared.settings.section import Section, shown

if TYPE_CHECKING:
    from shared.settings.root import Settings

RUNGS = (0, 1, 2)
"""Rungs of the ladder that are supported."""


class PlacementSettings(Section):
    """Which processes share a device (docs/placement.md)."""

    mode: Literal["separate", "shared", "lend"] = Field(default="separate")
    """`separate`: trainer and replicas have devices of their own. `shared`: trainer rank i and replica i use the same
    device in turn. `lend` is not supported yet."""
    rung: Literal["auto", 0, 1, 2, 3, 4] = Field(default="auto")
    """What a replica frees for training, with `shared`: nothing (0), its KV cache (1), its weights too (2). `auto`: the
    lowest that fits into memory, by measured sizes. 3 and 4 are not supported yet."""


def check_placement(settings: "Settings") -> None:
    """Raise ValueError where the placement is not supported."""
    placement, rollout, trainer = settings.placement, settings.rollout, settings.trainer
    if placement.mode == "lend":
        raise ValueError(
            'expected placement.mode = "separate" or "shared", found "lend": replicas on idle trainer devices are not supported '
            "yet; change placement.mode"
        )
    if placement.rung not in ("auto", *RUNGS):
        raise ValueError(
            f'expected placement.rung = "auto", 0, 1 or 2, found {placement.rung}: offloading the trainer\'s own memory is not '
            "supported yet; change placement.rung"
        )
    if placement.mode == "separate":
        return
    if settings.run.deterministic == "run" and placement.rung != 0:
        raise ValueError(
            'expected placement.rung = 0 with run.deterministic = "run", as a KV cache that is computed again rounds differently, '
            f"found {shown(placement.rung)}: change one of them"
        )
    if rollout.engine != "auto":
        check_shared_engine(settings, rollout.engine)
    for key, value, expected, reason in (
        ("rollout.replicas", rollout.replicas, trainer.ranks, "rank i and replica i share device i"),
        ("rollout.vllm.tensor_parallel_size", rollout.vllm.tensor_parallel_size, 1, "a replica has one device"),
        ("rollout.engines_per_gpu", rollout.engines_per_gpu, 1, "a replica suspends one engine"),
        ("rollout.nodes", rollout.nodes, 1, "it is for one host"),
        ("trainer.nodes", trainer.nodes, 1, "it is for one host"),
        ("weights.update", settings.weights.update, "inflight", "a freed replica continues with newer weights"),
        ("rollout.gpus", list(rollout.gpus or trainer.gpus), list(trainer.gpus), "the replicas use the trainer's GPUs"),
    ):
        if value != expected:
            raise ValueError(
                f'expected {key} = {shown(expected)} with placement.mode = "shared", where {reason}, found {shown(value)}: '
                "change one of them"
            )


def check_shared_engine(settings: "Settings", engine: str) -> None:
    """Raise ValueError where replicas of ``engine`` cannot share a device."""
    if settings.placement.mode == "shared" and engine != "transformers":
        raise ValueError(
            f'expected the engine "transformers" with placement.mode = "shared", found "{engine}", whose memory is not freed for '
            'training yet: change rollout.engine, or set placement.mode = "separate"'
        )
