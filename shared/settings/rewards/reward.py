"""What a completion is worth, and where model-written code runs: ``[reward]``, ``[reward.executor]``.

The tables of ``[[reward.scorers]]`` stand in ``scorers.py`` and ``models.py``.
"""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shared.settings.rewards.models import ModelsSettings
from shared.settings.rewards.scorers import AnswerScorer, Scorer
from shared.settings.section import Section


class ExecutorSettings(Section):
    """The process that runs model-written code, isolated (docs/sandbox.md)."""

    address: str = Field(default="", pattern=r"^(|unix:/.+|[^/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+)$")
    """Where it is: `unix:/path` or `host:port`; empty: `penstock up` starts one, where a scorer needs it."""
    isolation: Literal["auto", "namespace", "landlock", "unsafe"] = Field(default="auto")
    """How programs are isolated; `auto`: the strongest of namespace and landlock that holds on this host, else refuse.
    `unsafe` isolates nothing and is for code that you wrote yourself."""
    slots: NonNegativeInt = Field(default=0)
    """Programs that run at a time; 0: one a core, or fewer where a control group has a quota of CPU time."""
    interpreter: str = Field(default="")
    """Python that runs the programs; empty: the one that runs Penstock."""


class RewardSettings(Section):
    """What a completion is worth."""

    replicas: PositiveInt = Field(default=1)
    """How many `penstock up` starts."""
    expression: str = Field(default="")
    """The reward from the scorers' values, as `0.9 * answer + 0.1 * format`; empty: the mean of those that apply."""
    scorers: tuple[Scorer, ...] = Field(default=(AnswerScorer(kind="answer"),), min_length=1)
    """Who scores; all run at once."""
    models: ModelsSettings = Field(default=ModelsSettings())
    """Where reward models and the reference run."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """Which GPUs of this machine `penstock up` gives to the replicas, in turn, as many to each; none: they all see every
    GPU."""
    executor: ExecutorSettings = Field(default=ExecutorSettings())
    """The process that runs model-written code."""
