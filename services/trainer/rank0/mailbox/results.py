"""Answers of the training thread: a result per command except STOP, and notices."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.shared.bus.messages import MemorySample, Probe, StepPlan

R = TypeVar("R", bound="Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Completion of a command."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLoaded(Result):
    """Training can begin, below ``vocabulary`` and up to ``context_tokens`` (0: any length)."""

    vocabulary: int
    context_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed(Result):
    """A journal step was repeated; ``difference``: why its weights differ from the published ones."""

    difference: str


@dataclasses.dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a version's weights are; see :class:`penstock.shared.bus.messages.PolicyRecord`."""

    digest: str
    location: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class Published(Result):
    """Replicas can get the weights."""

    weights: Whereabouts | None
    """None on ranks other than 0."""
    probe: Probe | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepMade(Result):
    """A step was made and published, but not committed."""

    published: Published
    measured: Mapping[str, float]
    plan: StepPlan
    seconds: Mapping[str, float]
    """By phase, since the previous step."""
    memory: Mapping[str, float]
    samples: Sequence[Sequence[MemorySample]]
    """Of the memory timeline, by rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepSkipped(Result):
    """The batch's loss or gradient is not finite. ``touched``: some weights were already updated."""

    reason: str
    touched: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Freed(Result):
    """Memory is free down to a rung; ``memory``: bytes by component when resident."""

    memory: Mapping[str, float]
    moved_bytes: float = 0.0
    """To the host, of rank 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete, of all ranks, or storage refused it."""

    checkpoint: Checkpoint | None
    refusal: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyWritten(Result):
    """The final policy is in ``folders``, or could not be written."""

    folders: tuple[Path, ...]
    refusal: str = ""
    may_succeed: bool = False
    """Whether another try may succeed: storage refused it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SelfTested:
    """Notice: self-test result of a part of the model."""

    part: str
    outcome: str
    figures: Mapping[str, float]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StopRequested:
    """Notice: another host of this trainer received a stop signal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Began:
    """Notice: an activity of the start began."""

    activity: str


Notice = SelfTested | StopRequested | Began
