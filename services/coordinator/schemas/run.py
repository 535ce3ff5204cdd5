"""Schemas of the run and base classes of all answers. Names are a contract with the live view, `penstock status` and
scripts.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.bus.stores.ledger import RunState


class ResponseModel(BaseModel):
    """An API answer."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class StreamView(ResponseModel):
    """State of one stream."""

    entries: int
    pending: int
    """Groups held by replicas."""
    oldest_age_s: float
    """Age of its oldest group."""


class History(ResponseModel):
    """The newest steps, oldest first; one value a step in each list."""

    step: list[int]
    reward_mean: list[float | None]
    tokens_per_s: list[float | None]


class EstimateView(ResponseModel):
    """A share, 0 to 1."""

    value: float
    low: float
    high: float


class EvaluationView(ResponseModel):
    """Evaluation result of one set."""

    step: int
    """Optimizer step of the evaluated version."""
    version: int
    set: str
    accuracy: float | None
    """Mean share of correct completions over answered problems; null without answers."""
    accuracy_low: float | None
    """Lower end of its 95 % interval."""
    accuracy_high: float | None
    """Upper end of its 95 % interval."""
    pass_at: dict[str, EstimateView]
    """By k: probability that one of k completions is correct."""
    samples: int
    problems: int
    answered: int
    """Problems answered in time."""
    initial: bool
    final: bool
    note: str
    """Why answers are missing; empty if complete."""
    gate: str
    """passed, fell, or empty if the gate did not apply."""
    gate_detail: str
    """Reference and difference."""


class GuardView(ResponseModel):
    """A tripped guard."""

    guard: str
    action: str
    """tell or pause."""
    detail: str
    since_s: float
    """Unix seconds."""


class NoticeView(ResponseModel):
    """A notice for observers of the run."""

    about: str
    """Stable subject while the text changes: paused, guard kl, scorer 'answer', held-out data, …"""
    level: Literal["error", "warning"]
    """error: work is not done, or not as configured; warning: worth a look."""
    text: str


class RunView(ResponseModel):
    """The current run."""

    run_id: str
    state: RunState
    reason: str
    closed: bool
    """The run has ended and its records, summary and report are complete."""
    activity: str
    bus_full: str
    """Why admission waits for bus memory; empty if it does not."""
    guards: list[GuardView]
    notices: list[NoticeView]
    """Most important first."""
    self_tests: dict[str, str]
    """Newest self-test result of the trainer by subject: policy, critic."""
    step: int
    """Committed optimizer steps."""
    steps: int
    head: int | None
    """The version that replicas serve."""
    newest_version: int | None
    groups_in_flight: int
    """Groups between admission and commit."""
    slots: int
    """Maximum groups in flight."""
    cursor: int
    """Groups admitted so far."""
    streams: dict[str, StreamView]
    """prompts, rollouts, experience, journal."""
    counts: dict[str, int]
    """Groups by outcome: trained, dropped:<reason>, dead:<stream>; and requeued."""
    dead: int
    last: dict[str, float | None]
    """Metrics of the newest step."""
    lag_counts: dict[str, int]
    """Samples of the newest step by lag in steps."""
    history: History
    """The last 60 steps."""
    evaluations: list[EvaluationView]
    """Evaluations of the run's branch, oldest first; /v1/policies has those of revoked versions."""
    tokens_per_s: float
    started_at_s: float
    """Unix seconds."""
    training_s: float
    """From the first admission to the last commit (or now), without pauses."""
    eta_s: float | None
    """Seconds until the last step at the recent pace; null if unknown."""
    bus: str
    """Server name and version."""
    settings_revision: int


class RunChange(ResponseModel):
    """Result of a command."""

    state: RunState
    changed: bool
    """False if the run already had this state."""
    reason: str


class Command(BaseModel):
    """Body of a command."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    reason: str = Field(default="", max_length=500)
    """Shown with the run's state."""


class Pause(Command):
    """Body of a pause."""

    mode: Literal["admission", "drain"] = Field(default="admission")
    """`admission`: stop admitting, at once; `drain`: an operation, done when no group is generated or scored and less
    than a step's groups remain.
    """


class Export(BaseModel):
    """Body of an export."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    adapter: bool = Field(default=False)
    """Export the LoRA adapter alone, not merged."""


class Health(ResponseModel):
    """The process runs."""

    status: str


class Check(ResponseModel):
    """One requirement of the coordinator."""

    ok: bool
    detail: str


class Readiness(ResponseModel):
    """Whether the coordinator works."""

    ready: bool
    state: str
    """starting, working, …"""
    checks: dict[str, Check]


class ProblemDetails(ResponseModel):
    """An error, RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    """What was expected and what was found."""
    errors: list[str] = Field(default=[])
    """The individual errors; empty if `detail` says all."""
