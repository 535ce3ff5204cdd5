"""What the training thread answers: one result for each command but STOP, and notices beside them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from services.trainer.checkpoint.local_store import Checkpoint
from services.trainer.rank0.publication import Whereabouts
from shared.bus.messages import Probe, StepPlan

R = TypeVar("R", bound="Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The end of a command: it is done, and there is nothing more to say."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLoaded(Result):
    """Training can begin; it takes token ids below ``vocabulary``, and sequences within ``context_tokens`` (0: of any length)."""

    vocabulary: int
    context_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed(Result):
    """A step of the journal was repeated; ``difference`` says why its weights differ from what was published, if they do."""

    difference: str


@dataclasses.dataclass(frozen=True, slots=True)
class Published(Result):
    """Replicas can get the weights."""

    weights: Whereabouts | None
    """None on ranks other than 0."""
    probe: Probe | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepMade(Result):
    """A step was made and its weights published; it is not committed yet."""

    published: Published
    measured: Mapping[str, float]
    plan: StepPlan
    seconds: Mapping[str, float]
    """By phase, since the step before."""
    memory: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class StepSkipped(Result):
    """A batch gave a loss or gradient that is not finite. ``touched``: some weights were updated before it showed."""

    reason: str
    touched: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Saved(Result):
    """A checkpoint is complete, or storage refused it."""

    checkpoint: Checkpoint | None
    refusal: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyWritten(Result):
    """The final policy is in ``folders``."""

    folders: tuple[Path, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SelfTested:
    """Notice: how the self-test of a part of the model went."""

    part: str
    outcome: str
    figures: Mapping[str, float]
    reason: str
    """Why sequences are not packed; "" if they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class StopRequested:
    """Notice: another host of this trainer was told to stop."""


Notice = SelfTested | StopRequested
