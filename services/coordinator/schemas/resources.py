"""Schemas of versions, replicas, operations, dead letters, events, settings and runs. Lists are pages."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field

from penstock.services.coordinator.schemas.run import Command, EvaluationView, ResponseModel, Sentence
from penstock.shared.bus.stores.experience.dead_letters import DeadLetterSource
from penstock.shared.bus.stores.policy.ledger import RunState
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.bus.stores.replicas.cordon import Word
from penstock.shared.bus.stores.run.operations import OperationState
from penstock.shared.settings.rollout import LEAST_TEMPERATURE
from penstock.shared.text.redaction import redacted_values

T = TypeVar("T")


class Page(ResponseModel, Generic[T]):
    """A page of a list."""

    # pydantic would look for the source of each Page[...] in all imported modules
    model_config = ConfigDict(use_attribute_docstrings=False)

    items: list[T]
    next: str | None = Field(description="`cursor` of the next page; null: last page.")


class PolicyView(ResponseModel):
    """One policy version."""

    version: int
    """Never reused."""
    parent: int | None
    """The version it was trained from."""
    step: int
    state: PolicyState | None
    """published, live, retired or revoked."""
    checkpoint: str | None
    """Folder or URI, if any."""
    created_at_s: float
    """Commit time, Unix seconds."""
    location: str
    """Path of its disk snapshot; empty: never on disk."""
    source: str
    """Trainer host:port serving it; empty: by file only."""
    manifest_digest: str
    """SHA-256 of the pull's header or snapshot manifest."""
    metrics: dict[str, float | None]
    settings_revision: int
    evaluations: list[EvaluationView]
    """One per held-out set."""
    pinned: bool
    """Protected from cleanup."""
    released: bool
    """Approved for use."""


class ServiceView(ResponseModel):
    """One replica."""

    service: str
    """rollout, reward, trainer or coordinator."""
    replica: str
    state: str
    """starting, replaying, working, waiting, degraded, stopping, or silent: without heartbeats, with the values of the last one."""
    activity: str
    """What it does until it is ready, or that it is silent; else empty."""
    activity_since_s: float
    """Unix seconds."""
    version: int | None
    versions_behind: int | None
    healthy: bool
    cordon: Word | None
    """cordoned or draining, if requested."""
    taking: bool
    """A cordon applies from the next heartbeat."""
    settings_revision: int
    host: str
    pid: int
    address: str
    """Serves /metrics, /healthz and /readyz."""
    started_at_s: float
    """Unix seconds."""
    starts: int
    """Processes under this name so far."""
    seen_at_s: float
    """Last heartbeat, Unix seconds."""
    memory_bytes: int
    last_error: Sentence
    values: dict[str, float | None]
    source: str
    """host:port relaying weights; empty: none."""


class Difference(ResponseModel):
    """One metric of two versions."""

    left: float | None
    """Of the version in the path."""
    right: float | None
    """Of the other version."""
    change: float | None
    """right − left, if known."""


class Comparison(ResponseModel):
    """Comparison of two versions."""

    left: int
    """The version in the path."""
    right: int
    """The other version."""
    ancestor: int | None
    """Newest common ancestor; null: unknown."""
    left_steps: int
    """Optimizer steps since the ancestor, or the beginning."""
    right_steps: int
    metrics: dict[str, Difference]
    accuracy: Difference
    """On the first set, 0 to 1."""


class PolicyMark(ResponseModel):
    """Result of a mark."""

    version: int
    pinned: bool
    """Protected from cleanup."""
    released: bool
    """Approved for use."""
    changed: bool
    """False if it already was."""


class ReplicaChange(ResponseModel):
    """Result of a replica command."""

    replica: str
    cordon: Word | None
    """cordoned or draining; null: normal."""
    changed: bool
    """False if it already was."""


class OperationView(ResponseModel):
    """A long-running command."""

    id: int
    kind: str
    """pause, drain, …"""
    state: OperationState
    phase: str
    """Progress, specific to the kind."""
    detail: Sentence
    """Current wait or outcome."""
    request: dict[str, Any]
    result: dict[str, Any]
    created_at_s: float
    """Unix seconds."""
    changed_at_s: float
    """Last update, Unix seconds."""


class DeadLetterView(ResponseModel):
    """A failed entry."""

    stream: DeadLetterSource
    entry: str
    """Id in the dead-letter stream."""
    group: str
    reason: Sentence
    attempts: int
    buried_at_s: float
    """Unix seconds."""
    data_bytes: int


class DeadLetterMessage(DeadLetterView):
    """A dead letter with its message."""

    message: Any
    """Decoded, arrays cut after 256 elements."""
    unreadable: str
    """Decoding error."""


class DeadLetterChange(ResponseModel):
    """Result of a dead-letter command."""

    stream: DeadLetterSource
    entry: str
    """Id in the dead-letter stream."""
    outcome: Literal["requeued", "discarded"]


class EventView(ResponseModel):
    """One event."""

    id: str
    """Stream entry id."""
    at_s: float
    """Unix seconds."""
    source: str
    name: str
    detail: Sentence
    """One sentence."""
    fields: Annotated[dict[str, Any], AfterValidator(redacted_values)]


class StateView(ResponseModel):
    """A state change."""

    id: str
    at_s: float
    """Unix seconds."""
    before: RunState
    state: RunState
    reason: Sentence
    step: int
    """Committed steps then."""


class RunSummary(ResponseModel):
    """One run on this bus."""

    run_id: str
    state: RunState
    reason: Sentence
    step: int
    """Committed optimizer steps."""
    head: int | None
    """The version that replicas serve."""
    created_at_s: float
    """Unix seconds."""
    registered: bool
    """Services can start from its settings on the bus."""
    here: bool
    """Led by this coordinator."""


_MaxLag = Annotated[int, Field(ge=0, le=1_000_000, alias="algorithm.max_lag")]
_LearningRate = Annotated[float, Field(ge=0, le=10.0, alias="trainer.learning_rate")]
_Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=1e3, alias="sampling.temperature")]
_GroupSize = Annotated[int, Field(ge=2, le=4096, alias="sampling.group_size")]
_Expression = Annotated[str, Field(max_length=1000, alias="reward.expression")]
_Update = Annotated[Literal["inflight", "drain"], Field(alias="weights.update")]
_GpuHours = Annotated[float, Field(ge=0, le=1e9, alias="run.gpu_hours")]


class LiveValues(ResponseModel):
    """Settings that may change during the run (docs/api.md)."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_by_name=False, allow_inf_nan=False, strict=True
    )

    max_lag: _MaxLag
    """Steps that generation may be ahead."""
    learning_rate: _LearningRate
    """Peak learning rate."""
    temperature: _Temperature
    group_size: _GroupSize
    """Completions per prompt."""
    expression: _Expression
    """Reward from the scorers' values; empty: mean."""
    update: _Update
    """When new weights go live."""
    gpu_hours: _GpuHours
    """GPU-hours after which the run pauses; 0: no limit."""


class LiveSettings(ResponseModel):
    """The live settings; `ETag` is the revision."""

    revision: int
    """0: the run's file."""
    values: LiveValues
    reason: Sentence
    step: int
    """Committed steps then."""
    at_s: float | None
    """Last change, if any."""


class RevisionView(ResponseModel):
    """One change of the live settings."""

    revision: int
    changes: dict[str, Any]
    """By dotted name."""
    reason: Sentence
    step: int
    """Committed steps then."""
    at_s: float
    """Unix seconds."""


class LiveChanges(LiveValues):
    """Omitted settings are unchanged."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    max_lag: _MaxLag = 0
    learning_rate: _LearningRate = 0.0
    temperature: _Temperature = 1.0
    group_size: _GroupSize = 2
    expression: _Expression = ""
    update: _Update = "inflight"
    gpu_hours: _GpuHours = 0.0


class SettingsChange(Command):
    """A settings change."""

    changes: LiveChanges
    """At least one new value."""
