"""Client-side models of the HTTP API (docs/openapi.json).

Missing fields keep defaults and unknown ones are ignored, for other versions of the coordinator.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.shared.text.terminal import escaped

ENDED_STATES = ("stopped", "finished")
READY_STATES = ("working", "waiting", "degraded")


class View(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _escape(cls, values: Any) -> Any:
        """Escape text before its width is measured."""
        if not isinstance(values, dict):
            return values
        return {name: escaped(value) if isinstance(value, str) else value for name, value in values.items()}


class StreamDepth(View):
    entries: int = 0
    pending: int = 0
    oldest_age_s: float = 0.0


class Evaluation(View):
    """Held-out accuracy of one version, 0 to 1."""

    step: int = 0
    version: int = 0
    set: str = "heldout"
    accuracy: float | None = None
    """None without answers."""
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    """Its 95 % interval."""
    problems: int = 0
    initial: bool = False
    final: bool = False


class History(View):
    """The newest steps."""

    step: list[int] = Field(default=[])
    reward_mean: list[float | None] = Field(default=[])
    tokens_per_s: list[float | None] = Field(default=[])


class Notice(View):
    """A notice for observers."""

    about: str = ""
    """Stable subject while the text changes."""
    level: str = "warning"
    text: str = ""


class RunView(View):
    """``GET /v1/run``."""

    run_id: str = ""
    state: str = "created"
    reason: str = ""
    closed: bool = True
    """Once ended: records, summary and report are complete."""
    activity: str = ""
    notices: list[Notice] = Field(default=[])
    """Most important first."""
    bound: str = ""
    """What bounds the last step, and what would help."""
    self_tests: dict[str, str] = Field(default={})
    """Newest self-test result of the trainer, by subject."""
    step: int = 0
    steps: int = 0
    head: int | None = None
    newest_version: int | None = None
    groups_in_flight: int = 0
    slots: int = 0
    streams: dict[str, StreamDepth] = Field(default={})
    counts: dict[str, int] = Field(default={})
    last: dict[str, float | None] = Field(default={})
    history: History = Field(default=History())
    evaluations: list[Evaluation] = Field(default=[])
    tokens_per_s: float | None = None
    drawn_tokens_per_s: float = 0.0
    started_at_s: float | None = None
    training_s: float | None = None
    eta_s: float | None = None
    gpu_hours: float = 0.0
    bus: str = ""

    @property
    def extends(self) -> bool:
        """Whether the run had finished and is continued with more steps, but has not begun yet."""
        return self.state == "finished" and self.step < self.steps

    @property
    def ended(self) -> bool:
        """Return whether the run is over, with no steps left."""
        return self.state in ENDED_STATES and self.closed and not self.extends

    @property
    def has_letters(self) -> bool:
        """Whether the run may be extended, and has dead letters to revive then."""
        dead = (count for outcome, count in self.counts.items() if outcome.startswith("dead:"))
        return self.state == "finished" and any(dead)


class ReplicaView(View):
    """One entry of ``GET /v1/services``."""

    service: str = ""
    replica: str = ""
    state: str = ""
    version: int | None = None
    pid: int = 0
    address: str = ""
    started_at_s: float = 0.0
    starts: int = 1
    """Processes started under this name."""
    seen_at_s: float = 0.0
    memory_bytes: int = 0
    last_error: str = ""
    activity: str = ""
    """What it does until it is ready."""
    activity_since_s: float = 0.0
    values: dict[str, float | None] = Field(default={})
    cordon: str | None = None
    """"cordoned" or "draining", if requested."""

    @property
    def ready(self) -> bool:
        return self.state in READY_STATES


class PolicyView(View):
    """One entry of ``GET /v1/policies``."""

    version: int = 0
    parent: int | None = None
    """The version it was trained from."""
    step: int = 0
    state: str | None = None
    """published, live, retired or revoked."""
    checkpoint: str | None = None
    """Folder or URI, if there is one."""
    created_at_s: float = 0.0
    metrics: dict[str, float | None] = Field(default={})
    evaluations: list[Evaluation] = Field(default=[])
    pinned: bool = False
    released: bool = False


class ServicesPage(View):
    services: list[ReplicaView] = Field(default=[])

    @model_validator(mode="before")
    @classmethod
    def _named(cls, answer: object) -> object:
        return {"services": answer["items"]} if isinstance(answer, dict) and "items" in answer else answer


class EventView(View):
    """One entry of ``GET /v1/events``."""

    id: str = ""
    at_s: float = 0.0
    """Unix seconds."""
    source: str = ""
    name: str = ""
    detail: str = ""


class EventsPage(View):
    """A page of events, newest first."""

    items: list[EventView] = Field(default=[])
