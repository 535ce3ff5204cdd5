"""What the HTTP API says of versions, replicas, operations, dead letters, events, settings and other runs. A contract, as ``models``.

Lists are pages: ``items``, and ``next``, the cursor of the page after it (null: there is none).
"""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field

from services.coordinator.schemas.run import Command, EvaluationView, ResponseModel
from shared.bus.stores.cordon import Word
from shared.bus.stores.dead_letters import DeadLetterSource
from shared.bus.stores.ledger import RunState
from shared.bus.stores.operations import OperationState
from shared.bus.stores.policies import PolicyState

T = TypeVar("T")


class Page(ResponseModel, Generic[T]):
    """A part of a list."""

    items: list[T]
    """In the list's order."""
    next: str | None
    """Give it as `cursor` to get what follows; null at the end."""


class PolicyView(ResponseModel):
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
    """Folder of its checkpoint, or its URI in object storage, if it has one."""
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
    settings_revision: int
    """Under which revision of the live settings its step was trained."""
    evaluations: list[EvaluationView]
    """What its evaluation found, one for each set; empty: it was not evaluated."""
    pinned: bool
    """Its checkpoint is kept from cleanup."""
    released: bool
    """People may use it."""


class ServiceView(ResponseModel):
    """One replica that is there."""

    service: str
    """rollout, reward, trainer or coordinator."""
    replica: str
    """Its name."""
    state: str
    """starting, working, waiting, degraded or stopping."""
    version: int | None
    """The policy version that it holds, where it holds one."""
    versions_behind: int | None
    """How many versions the head is ahead of that."""
    healthy: bool
    """It does its work, and says nothing of trouble."""
    cordon: Word | None
    """cordoned or draining, where it was told so."""
    taking: bool
    """Whether it takes new work; a replica learns of a cordon with its next heartbeat."""
    settings_revision: int
    """Under which revision of the live settings it works."""
    host: str
    """Its machine."""
    pid: int
    """Its process."""
    address: str
    """host:port of its /metrics, /healthz and /readyz."""
    started_at_s: float
    """When it started, Unix time."""
    starts: int
    """Number of processes that this run has had under this name, including this one."""
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


class Difference(ResponseModel):
    """One figure of two versions."""

    left: float | None
    """Of the version in the path."""
    right: float | None
    """Of the one it is compared with."""
    change: float | None
    """right − left; null where one is not known."""


class Comparison(ResponseModel):
    """Two versions beside each other."""

    left: int
    """The version in the path."""
    right: int
    """The one it is compared with."""
    ancestor: int | None
    """The newest version that both come from; null: none is known."""
    left_steps: int
    """Optimizer steps from the ancestor to the left one; from the beginning where there is none."""
    right_steps: int
    """The same to the right one."""
    metrics: dict[str, Difference]
    """What was measured at their steps."""
    accuracy: Difference
    """What their evaluations found of the first set, 0 to 1."""


class PolicyMark(ResponseModel):
    """What a mark did."""

    version: int
    """The version."""
    pinned: bool
    """Its checkpoint is kept from cleanup."""
    released: bool
    """People may use it."""
    changed: bool
    """False when it was so already."""


class ReplicaChange(ResponseModel):
    """What a replica was told."""

    replica: str
    """Its name."""
    cordon: Word | None
    """cordoned or draining; null: it works as ever."""
    changed: bool
    """False when it was told so already."""


class OperationView(ResponseModel):
    """A command that takes a while."""

    id: int
    """Its number."""
    kind: str
    """What is done: pause, drain, …"""
    state: OperationState
    """running, succeeded, failed or cancelled."""
    phase: str
    """How far it is, in the kind's own words."""
    detail: str
    """What is waited for, or how it ended."""
    request: dict[str, Any]
    """What was asked for."""
    result: dict[str, Any]
    """What came of it."""
    created_at_s: float
    """Unix time."""
    changed_at_s: float
    """When it last said something new, Unix time."""


class DeadLetterView(ResponseModel):
    """An entry that could not be handled."""

    stream: DeadLetterSource
    """The stream that it was buried from."""
    entry: str
    """Its name among that stream's dead letters."""
    group: str
    """The group's id; empty: it has none."""
    reason: str
    """Why it was buried."""
    attempts: int
    """How often it was tried."""
    buried_at_s: float
    """Unix time."""
    data_bytes: int
    """Size of its message."""


class DeadLetterMessage(DeadLetterView):
    """An entry that could not be handled, with what is in it."""

    message: Any
    """Decoded, arrays cut after 256 elements; null where it cannot be read."""
    unreadable: str
    """Why it cannot be read; empty: it can."""


class DeadLetterChange(ResponseModel):
    """What became of a dead letter."""

    stream: DeadLetterSource
    """The stream that it was buried from."""
    entry: str
    """Its name there."""
    outcome: Literal["requeued", "discarded"]
    """What was done."""


class EventView(ResponseModel):
    """Something that happened."""

    id: str
    """Its place among the events."""
    at_s: float
    """Unix time."""
    source: str
    """Who says so."""
    name: str
    """What."""
    detail: str
    """In a sentence."""
    fields: dict[str, Any]
    """Its values."""


class StateView(ResponseModel):
    """A state that the run came into."""

    id: str
    """Its place in the history."""
    at_s: float
    """Unix time."""
    before: RunState
    """The state before it."""
    state: RunState
    """The new one."""
    reason: str
    """Why."""
    step: int
    """Committed steps at that time."""


class RunSummary(ResponseModel):
    """One run on this bus."""

    run_id: str
    """The run."""
    state: RunState
    """created, running, paused, stopped or finished."""
    reason: str
    """Why it is in this state."""
    step: int
    """Committed optimizer steps."""
    head: int | None
    """The version that replicas serve."""
    created_at_s: float
    """Unix time."""
    registered: bool
    """Its settings lie on the bus, so that services may start from them."""
    here: bool
    """This coordinator leads it; every other one has its own."""


_MaxLag = Annotated[int, Field(ge=0, le=1_000_000, alias="algorithm.max_lag")]
_LearningRate = Annotated[float, Field(ge=0, le=10.0, alias="trainer.learning_rate")]
_Temperature = Annotated[float, Field(ge=1e-3, le=1e3, alias="sampling.temperature")]
_GroupSize = Annotated[int, Field(ge=2, le=4096, alias="sampling.group_size")]
_Expression = Annotated[str, Field(max_length=1000, alias="reward.expression")]
_Update = Annotated[Literal["inflight", "drain"], Field(alias="weights.update")]


class LiveValues(ResponseModel):
    """The settings that may change while the run goes on; see docs/api.md for when each takes effect."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_by_name=False, allow_inf_nan=False, strict=True
    )

    max_lag: _MaxLag
    """Steps that generation may be ahead."""
    learning_rate: _LearningRate
    """Peak learning rate."""
    temperature: _Temperature
    """Softmax temperature."""
    group_size: _GroupSize
    """Completions per prompt."""
    expression: _Expression
    """The reward from the scorers' values; empty: their mean."""
    update: _Update
    """When new weights go live."""


class LiveSettings(ResponseModel):
    """The live settings, now. Its `ETag` is the revision."""

    revision: int
    """0: as the run's file has them."""
    values: LiveValues
    """As they are."""
    reason: str
    """Why they were last changed."""
    step: int
    """Steps that were committed then."""
    at_s: float | None
    """When, Unix time; null: never."""


class RevisionView(ResponseModel):
    """One change of the live settings."""

    revision: int
    """Its number."""
    changes: dict[str, Any]
    """What was changed, by dotted name."""
    reason: str
    """Why."""
    step: int
    """Steps that were committed then."""
    at_s: float
    """When, Unix time."""


class LiveChanges(LiveValues):
    """New values; what is not named stays."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    max_lag: _MaxLag = 0
    learning_rate: _LearningRate = 0.0
    temperature: _Temperature = 1.0
    group_size: _GroupSize = 2
    expression: _Expression = ""
    update: _Update = "inflight"


class SettingsChange(Command):
    """What to change."""

    changes: LiveChanges
    """New values, at least one."""
