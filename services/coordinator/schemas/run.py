"""Schemas of the run, and base classes of all answers. Names are a contract with clients."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from penstock.shared.bus.messages import FinishReason
from penstock.shared.bus.stores.policy.ledger import RunState
from penstock.shared.text.redaction import redacted

Sentence = Annotated[str, AfterValidator(redacted)]
"""Text of programs and people, without the secrets of addresses and headers in it."""


class ResponseModel(BaseModel):
    """An API answer."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class StreamView(ResponseModel):
    """State of one stream."""

    entries: int
    pending: int
    """Groups held by replicas."""
    oldest_age_s: float


class History(ResponseModel):
    """One value a step, oldest first."""

    step: list[int]
    reward_mean: list[float | None]
    tokens_per_s: list[float | None]


class EstimateView(ResponseModel):
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float


class EvaluationView(ResponseModel):
    """Evaluation result of one set."""

    step: int
    version: int
    set: str
    accuracy: float | None
    """Mean correct share over answered problems."""
    accuracy_low: float | None
    """95 % interval."""
    accuracy_high: float | None
    """95 % interval."""
    pass_at: dict[str, EstimateView]
    """Probability that one of k is correct."""
    samples: int
    problems: int
    answered: int
    initial: bool
    final: bool
    note: Sentence
    """Why answers are missing."""
    gate: str
    """passed, fell, or empty: not applied."""
    gate_detail: Sentence
    """Reference and difference."""
    turns: float | None
    """Mean answers of the policy in an episode; null: no episodes."""
    calls: float | None
    """Mean calls of tools in an episode."""
    ended: dict[str, float]
    """Share of the episodes that ended so."""


class GuardView(ResponseModel):
    """A tripped guard."""

    guard: str
    action: str
    """tell or pause."""
    detail: Sentence
    since_s: float
    """Unix seconds."""


class NoticeView(ResponseModel):
    """A notice for observers."""

    about: str
    """Stable subject: paused, guard kl, scorer 'answer', held-out data, …"""
    level: Literal["error", "warning", "info"]
    """error: work is not done as configured; warning: worth a look; info: as requested."""
    text: Sentence


class RunView(ResponseModel):
    """The current run."""

    run_id: str
    state: RunState
    reason: Sentence
    closed: bool
    """Ended, with complete records, summary and report."""
    recorded: bool = False
    """Read from its folder after its end: commands are refused."""
    activity: str
    bus_full: Sentence
    """Why admission waits for memory, if it does."""
    guards: list[GuardView]
    notices: list[NoticeView]
    """Most important first."""
    bound: str
    """What bounds the last step, and what would help; empty: not known."""
    self_tests: dict[str, str]
    """Trainer's newest self-test: policy, critic."""
    step: int
    """Committed optimizer steps."""
    steps: int
    head: int | None
    """The version that replicas serve."""
    newest_version: int | None
    groups_in_flight: int
    slots: int
    """Maximum groups in flight."""
    cursor: int
    """Groups admitted so far."""
    streams: dict[str, StreamView]
    """prompts, rollouts, experience, journal."""
    counts: dict[str, int]
    """trained, dropped:<reason>, dead:<stream>, requeued, lost_samples."""
    dead: int
    last: dict[str, float | None]
    lag_counts: dict[str, int]
    """Newest step's samples by lag in steps."""
    history: History
    """The last 60 steps."""
    evaluations: list[EvaluationView]
    """The branch's first and its newest 200, oldest first; /v1/policies has all."""
    tokens_per_s: float
    """Trained, in the newest step; 0 while the run is paused."""
    drawn_tokens_per_s: float
    """Drawn by all replicas, as of their newest heartbeats, of unfinished samples, too."""
    started_at_s: float
    """Unix seconds."""
    training_s: float
    """First admission to last commit, without pauses and stops."""
    eta_s: float | None
    """At the recent pace, if known."""
    gpu_hours: float
    """Held by the run's processes so far."""
    bus: str
    """Server name and version."""
    settings_revision: int


class RunChange(ResponseModel):
    """Result of a command."""

    state: RunState
    changed: bool
    """False if it already was."""
    reason: Sentence


class Command(BaseModel):
    """Body of a command."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    reason: str = Field(default="", max_length=500)
    """Shown with the state."""


class Pause(Command):
    """Body of a pause."""

    mode: Literal["admission", "drain"] = Field(default="admission")
    """`admission`: stop admitting; `drain`: an operation, done when less than a step's groups remain, none generated or
    scored.
    """


class Export(BaseModel):
    """Body of an export."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    adapter: bool = Field(default=False)
    """Only the LoRA adapter, not merged."""


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    role: str = Field(min_length=1, max_length=64)
    content: str = Field(max_length=65_536)


class Question(BaseModel):
    """Body of a generation: either `prompt` or `messages`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    prompt: str | None = Field(default=None, min_length=1, max_length=65_536)
    """Text, as it is."""
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=1000)
    """Conversation, in the chat template of the policy's tokenizer."""
    samples: int = Field(default=1, ge=1, le=64)
    max_new_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """Default, and maximum: `sampling.max_new_tokens`."""
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    """Default: `sampling.temperature`; 0: greedy."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "Question":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class Generated(ResponseModel):
    """One completion of the live policy."""

    text: str
    tokens: int
    finish_reason: FinishReason
    versions: list[int]
    """Policy versions that generated it."""


class Answer(ResponseModel):
    """Completions of the live policy."""

    replica: str
    prompt_tokens: int
    completions: list[Generated]


class Health(ResponseModel):
    """The process runs."""

    status: str


class Check(ResponseModel):
    """One requirement."""

    ok: bool
    detail: Sentence


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
    errors: list[str] = Field(default=[])
    """Individual errors; empty: see `detail`."""
