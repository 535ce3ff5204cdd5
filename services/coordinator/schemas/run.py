"""What the HTTP API says of the run, and the frame of all of its answers. Names here are a contract: the live view,
`penstock status` and scripts read them. What it says of versions, replicas and the rest lies in ``resources``."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.bus.stores.ledger import RunState


class ResponseModel(BaseModel):
    """One answer of the API."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class StreamView(ResponseModel):
    """How much lies in one stream."""

    entries: int
    """Groups in it."""
    pending: int
    """Those in a replica's hands."""
    oldest_age_s: float
    """How long its oldest group has been there."""


class History(ResponseModel):
    """The newest steps, oldest first; one value a step in each list."""

    step: list[int]
    """Optimizer steps."""
    reward_mean: list[float | None]
    """Mean reward of the step's samples."""
    tokens_per_s: list[float | None]
    """Trained tokens per second."""


class EstimateView(ResponseModel):
    """A share, 0 to 1."""

    value: float
    """The estimate."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end of its 95 % interval."""


class EvaluationView(ResponseModel):
    """What one evaluation found of one set."""

    step: int
    """Optimizer step of the evaluated version."""
    version: int
    """The evaluated version."""
    set: str
    """Which held-out problems."""
    accuracy: float | None
    """Mean over the answered problems of the share of correct completions; null when nothing was answered."""
    accuracy_low: float | None
    """Lower end of its 95 % interval."""
    accuracy_high: float | None
    """Upper end of its 95 % interval."""
    pass_at: dict[str, EstimateView]
    """By k: the probability that one of k completions is correct."""
    samples: int
    """Completions of each problem."""
    problems: int
    """How many problems were asked."""
    answered: int
    """How many were answered in time."""
    initial: bool
    """It evaluated the initial policy."""
    final: bool
    """It evaluated the final policy."""
    note: str
    """Why problems are without an answer; empty when all have one."""
    gate: str
    """passed, fell, or empty where the gate did not look."""
    gate_detail: str
    """Against what it was compared, and what that gave."""


class GuardView(ResponseModel):
    """A guard that tripped."""

    guard: str
    """Its name, as in guards.pause."""
    action: str
    """What was done: tell or pause."""
    detail: str
    """What it found."""
    since_s: float
    """Since when, Unix time."""


class NoticeView(ResponseModel):
    """Something that whoever watches the run should know."""

    about: str
    """What it is about; it stays while the text changes: paused, guard kl, scorer 'answer', held-out data, …"""
    level: Literal["error", "warning"]
    """error: work is not done, or not done as configured; warning: worth a look."""
    text: str
    """The whole of it, for people."""


class RunView(ResponseModel):
    """The run, now."""

    run_id: str
    """The run."""
    state: RunState
    """created, running, paused, stopped or finished."""
    reason: str
    """Why it is in this state."""
    closed: bool
    """The run has ended and its records, summary and report are whole."""
    activity: str
    """What it does now, in a few words."""
    bus_full: str
    """Why admission waits for memory on the bus; empty when it does not."""
    guards: list[GuardView]
    """What is wrong with it now."""
    notices: list[NoticeView]
    """What whoever watches should know, the most important first: why the run is paused, what fails and why."""
    self_tests: dict[str, str]
    """How the trainer's newest self-test went, in words, by what was tested: policy, critic; empty before the first."""
    step: int
    """Committed optimizer steps."""
    steps: int
    """How many the run makes."""
    head: int | None
    """The version that replicas serve."""
    newest_version: int | None
    """The newest committed version."""
    groups_in_flight: int
    """Groups between admission and commit."""
    slots: int
    """How many may be in flight."""
    cursor: int
    """Groups admitted so far."""
    streams: dict[str, StreamView]
    """prompts, rollouts, experience, journal."""
    counts: dict[str, int]
    """How groups ended: trained, dropped:<reason>, dead:<stream>; and how many were requeued."""
    dead: int
    """Entries among the dead letters."""
    last: dict[str, float | None]
    """Metrics of the newest step."""
    lag_counts: dict[str, int]
    """Samples of the newest step by lag in steps."""
    history: History
    """The last 60 steps."""
    evaluations: list[EvaluationView]
    """Every evaluation of the run's branch, oldest first; those of revoked versions are at /v1/policies."""
    tokens_per_s: float
    """Trained tokens per second in the newest step."""
    started_at_s: float
    """When the run was created, Unix time."""
    training_s: float
    """From the first admission to the last commit (or to now), without pauses."""
    eta_s: float | None
    """Seconds until the last step at the pace of the last ones; null when nobody can tell."""
    bus: str
    """Name and version of the server."""
    settings_revision: int
    """The newest revision of the settings that may change while the run goes on."""


class RunChange(ResponseModel):
    """What a command did."""

    state: RunState
    """The state after it."""
    changed: bool
    """False when the run was in this state already."""
    reason: str
    """Why, as the run keeps it."""


class Command(BaseModel):
    """What may come with a command."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    reason: str = Field(default="", max_length=500)
    """Why; shown wherever the run's state is."""


class Pause(Command):
    """How to pause."""

    mode: Literal["admission", "drain"] = Field(default="admission")
    """`admission`: nothing more is admitted, at once; `drain`: an operation, which is done when nothing is generated or scored
    any more and less than a step's groups are left."""


class Export(BaseModel):
    """What to export."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    adapter: bool = Field(default=False)
    """The LoRA adapter alone, not merged."""


class Health(ResponseModel):
    """The process runs."""

    status: str
    """ok."""


class Check(ResponseModel):
    """One thing that the coordinator needs."""

    ok: bool
    """It is there."""
    detail: str
    """What was found."""


class Readiness(ResponseModel):
    """Whether the coordinator does its work."""

    ready: bool
    """It does."""
    state: str
    """starting, working, …"""
    checks: dict[str, Check]
    """What was looked at, by name."""


class ProblemDetails(ResponseModel):
    """An error, RFC 9457."""

    type: str
    """about:blank."""
    title: str
    """The status in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What was expected and what was found."""
    errors: list[str] = Field(default=[])
    """Each of several errors by itself; empty where `detail` says all."""
