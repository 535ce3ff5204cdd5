"""``[reward]`` and ``[reward.executor]``; the tables of scorers are in ``scorers.py`` and ``models.py``."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from penstock.shared.reasoning import KNOWN
from penstock.shared.settings.rewards.models import ModelsSettings, TeacherSettings
from penstock.shared.settings.rewards.scorers import AnswerScorer, Scorer
from penstock.shared.settings.section import Count, OptionalPath, Section


class ExecutorSettings(Section):
    """The process that runs model-written code, isolated (docs/sandbox.md)."""

    address: str = Field(default="", pattern=r"^(|unix:/.+|[^/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+)$")
    """Address of the executor: `unix:/path` or `host:port`. Empty: `penstock up` starts one if a scorer or tool needs it."""
    secret_file: OptionalPath = Field(default=None)
    """File, readable by its user alone, whose first line is the secret of the executor and its clients. Required if
    `address` is neither a Unix socket nor loopback."""
    isolation: Literal["auto", "namespace", "landlock", "unsafe"] = Field(default="auto")
    """`auto`: the strongest of namespace and landlock that works on this host, else the start is refused. `unsafe`
    isolates nothing; use it only for code that you wrote."""
    slots: NonNegativeInt = Field(default=0)
    """Most programs that run at a time; 0: one per core, or fewer if a control group limits CPU time."""
    interpreter: str = Field(default="")
    """Python that runs the programs; empty: the one that runs Penstock."""


class RewardSettings(Section):
    """What a completion is worth."""

    replicas: Count = Field(default=1)
    """Replicas that `penstock up` starts."""
    expression: str = Field(default="")
    """Formula of the scorers' values: `0.9 * answer + 0.1 * format`. Empty: the mean of those that apply."""
    scorers: tuple[Scorer, ...] = Field(default=(AnswerScorer(kind="answer"),), min_length=1)
    """Scorers, each a table [[reward.scorers]] with a kind; all run concurrently."""
    reasoning: Literal["auto", "none"] | tuple[str, str] = Field(default="auto")
    """Texts around the policy's reasoning, such as ["<reason>", "</reason>"]. `auto`: those of the known model
    families; `none`: all of a completion is its answer (docs/rewards.md, "Reasoning")."""
    teachers: tuple[TeacherSettings, ...] = Field(default=())
    """Teachers, each a table [[reward.teachers]] (docs/rewards.md, "Teachers")."""
    models: ModelsSettings = Field(default=ModelsSettings())
    """Where reward models, the reference and teachers run."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """GPU indices for the replicas, in turn, among those in CUDA_VISIBLE_DEVICES, under `penstock up`.
    Empty: all."""
    executor: ExecutorSettings = Field(default=ExecutorSettings())
    """The process that runs model-written code."""

    @property
    def runs_code(self) -> bool:
        """Whether a scorer runs model-written code."""
        return any(scorer.kind == "code" for scorer in self.scorers)

    @property
    def reasoning_markers(self) -> Mapping[str, str]:
        """The closing of each opening."""
        if isinstance(self.reasoning, tuple):
            return {self.reasoning[0]: self.reasoning[1]}
        return KNOWN if self.reasoning == "auto" else {}

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that stay in completions even if they are special tokens."""
        pairs = self.reasoning_markers
        return (*pairs, *pairs.values(), *(text for scorer in self.scorers for text in scorer.markers))

    @model_validator(mode="after")
    def _opens_and_closes(self) -> "RewardSettings":
        if isinstance(self.reasoning, tuple) and not (all(self.reasoning) and len(set(self.reasoning)) == 2):
            raise ValueError(
                f"expected two different texts around the reasoning, found {list(self.reasoning)}: change reward.reasoning"
            )
        return self
