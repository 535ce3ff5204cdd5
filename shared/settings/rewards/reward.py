"""What a completion is worth, and where model-written code runs: ``[reward]``, ``[reward.executor]``.

The tables of ``[[reward.scorers]]`` stand in ``scorers.py`` and ``models.py``.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shared.settings.rewards.models import ReferenceSettings
from shared.settings.rewards.scorers import AnswerScorer, Scorer
from shared.settings.section import Section


class ExecutorSettings(Section):
    """The process that runs model-written code, isolated (docs/sandbox.md)."""

    address: str = Field(default="", pattern=r"^(|unix:/.+|[^/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+)$")
    """Where it is: `unix:/path` or `host:port`; empty: `penstock up` starts one, where a scorer needs it."""
    secret_file: Path | None = Field(default=None)
    """A file, readable by its user alone, whose first line the executor and its clients prove to each other that they know; needed where
    `address` is no Unix socket and not loopback."""
    isolation: Literal["auto", "namespace", "landlock", "unsafe"] = Field(default="auto")
    """How programs are isolated; `auto`: the strongest of namespace and landlock that holds on this host, else refuse.
    `unsafe` isolates nothing and is for code that you wrote yourself."""
    slots: NonNegativeInt = Field(default=0)
    """Most programs that run at a time; 0 or more than there are cores: one a core, or fewer where a control group has a quota."""
    profiles: tuple[Literal["stdlib", "numpy"], ...] = Field(default=("stdlib", "numpy"), min_length=1)
    """Interpreters that are kept warm: with the standard library alone, or with numpy."""
    interpreter: str = Field(default="")
    """Python that runs the programs; empty: the one that runs Penstock."""
    user_id: PositiveInt = Field(default=65_534)
    """User that programs run as when the executor is started by root; otherwise they run as the executor's own."""
    recycle_after: PositiveInt = Field(default=5_000)
    """A warm interpreter is replaced after so many programs."""
    check_every_s: PositiveFloat = Field(default=15.0)
    """Each so often a program that tries to escape is run; unless it is contained, /readyz says no."""
    max_waiting: PositiveInt = Field(default=1024)
    """So many programs of one connection may wait or run; further ones are not read before."""
    metrics_port: NonNegativeInt = Field(default=0)
    """Port of /metrics, /healthz and /readyz; 0: any free one."""


class RewardSettings(Section):
    """What a completion is worth."""

    replicas: PositiveInt = Field(default=1)
    """How many `penstock up` starts."""
    expression: str = Field(default="")
    """The reward from the scorers' values, as `0.9 * answer + 0.1 * format`; empty: the mean of those that apply."""
    scorers: tuple[Scorer, ...] = Field(default=(AnswerScorer(kind="answer"),), min_length=1)
    """Who scores; all run at once."""
    max_groups: PositiveInt = Field(default=32)
    """How many groups one replica scores at a time; the others wait on the bus."""
    reference: ReferenceSettings = Field(default=ReferenceSettings())
    """The frozen initial policy, where algorithm.reference = "reward"."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """Which GPUs of this machine `penstock up` gives to the replicas, in turn, as many to each; none: they all see every
    GPU."""
    metrics_port: NonNegativeInt = Field(default=0)
    """Port of /metrics, /healthz and /readyz; 0: any free one."""
    executor: ExecutorSettings = Field(default=ExecutorSettings())
    """The process that runs model-written code."""
