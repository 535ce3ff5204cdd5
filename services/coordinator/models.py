"""What the HTTP API answers. Names here are a contract: the live view, `penstock status` and scripts read them."""

from pydantic import BaseModel, ConfigDict, Field

from shared.ledger import PolicyState, RunState


class Answer(BaseModel):
    """One answer of the API."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class StreamView(Answer):
    """How much lies in one stream."""

    entries: int
    """Groups in it."""
    pending: int
    """Those in a replica's hands."""
    oldest_age_s: float
    """How long its oldest group has been there."""


class History(Answer):
    """The newest steps, oldest first; one value a step in each list."""

    step: list[int]
    """Optimizer steps."""
    reward_mean: list[float | None]
    """Mean reward of the step's samples."""
    tokens_per_s: list[float | None]
    """Trained tokens per second."""


class EvaluationView(Answer):
    """What one evaluation found."""

    step: int
    """Optimizer step of the evaluated version."""
    version: int
    """The evaluated version."""
    accuracy: float | None
    """Share of the answered problems that are correct; null when nothing was answered."""
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


class GuardView(Answer):
    """A guard that tripped."""

    guard: str
    """Its name, as in the settings: [guards.<name>]."""
    action: str
    """What was done: tell or pause."""
    detail: str
    """What it found."""
    since_s: float
    """Since when, Unix time."""


class RunView(Answer):
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
    guards: list[GuardView]
    """What is wrong with it now."""
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
    """Every evaluation, oldest first."""
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


class RollbackView(Answer):
    """One rollback."""

    id: str
    """Names it."""
    target: int
    """The version that the run goes back to."""
    stage: str
    """loading (the trainer), pulling (the replicas), live or failed."""
    reason: str
    """Why, in words."""
    from_step: int
    """The step at which the run was."""
    revoked: int
    """How many versions were revoked; their samples are never trained on."""
    undone: int
    """How many trained groups belong to the branch that was left."""
    resumes: bool
    """The run goes on by itself once the version is live."""
    version: int | None
    """The new version with the target's weights; null until the trainer has published it."""
    detail: str
    """What it waits for, or why it failed."""
    started_at_s: float
    """When it began, Unix time."""
    changed_at_s: float
    """When it last moved on, Unix time."""


class RunChange(Answer):
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


class PolicyView(Answer):
    """One policy version."""

    version: int
    """Its number, never reused."""
    parent: int | None
    """The version that it was trained from."""
    step: int
    """Optimizer step."""
    state: PolicyState | None
    """published, live, retired or revoked."""
    checkpoint: str | None
    """Folder of its checkpoint, if it has one."""
    created_at_s: float
    """When it was committed, Unix time."""
    location: str
    """Where its snapshot on disk is or was; empty: it never was on disk."""
    source: str
    """Where the trainer serves or served it, host:port; empty: by file only."""
    manifest_digest: str
    """SHA-256, hex, of what vouches for its weights: a pull's header, or the manifest of a snapshot on disk."""
    metrics: dict[str, float | None]
    """What was measured at its step."""


class ServiceView(Answer):
    """One replica that is there."""

    service: str
    """rollout, reward, trainer or coordinator."""
    replica: str
    """Its name."""
    state: str
    """starting, working, waiting, degraded or stopping."""
    version: int | None
    """The policy version that it holds, where it holds one."""
    host: str
    """Its machine."""
    pid: int
    """Its process."""
    address: str
    """host:port of its /metrics, /healthz and /readyz."""
    started_at_s: float
    """When it started, Unix time."""
    seen_at_s: float
    """Its last heartbeat, Unix time."""
    memory_bytes: int
    """Resident memory."""
    last_error: str
    """What went wrong last."""
    values: dict[str, float | None]
    """Its own figures."""
    source: str
    """host:port where it passes weights on to other replicas; empty: nowhere."""


class Health(Answer):
    """The process runs."""

    status: str
    """ok."""


class Readiness(Answer):
    """Whether the coordinator does its work."""

    ready: bool
    """It does."""
    state: str
    """starting, working, …"""
    bus: bool
    """The bus answers."""


class Problem(Answer):
    """An error, RFC 9457."""

    type: str
    """about:blank."""
    title: str
    """The status in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What was expected and what was found."""
