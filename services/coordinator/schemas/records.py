"""Schemas of training records: step reports, and groups with their scores."""

from collections.abc import Mapping
from typing import Any, Literal

from penstock.services.coordinator.schemas.run import ResponseModel, Sentence
from penstock.shared.bus.messages import FinishReason, Json, ScoreStatus


class StepView(ResponseModel):
    """The trainer's report of one optimizer step."""

    id: str
    """Stream entry id."""
    step: int
    version: int
    """The resulting policy version."""
    finished_at_s: float
    """Commit time, Unix seconds."""
    samples: int
    lag_counts: dict[str, int]
    """Trained samples by lag in steps."""
    metrics: dict[str, float | None]
    """See docs/reference/metrics.md; null: not finite."""


class CurveView(ResponseModel):
    """One metric by bucket; null: no value."""

    last: list[float | None]
    low: list[float | None] | None
    """Minimum; null: each bucket is one step."""
    high: list[float | None] | None
    """Maximum."""


class MarkView(ResponseModel):
    """What happened to the run at a step."""

    step: int
    kind: Literal["rollback", "restart", "settings"]
    text: Sentence


class CurvesView(ResponseModel):
    """The metrics of a range of steps, in buckets."""

    first_step: int
    """Of the run, as far as it is read."""
    last_step: int
    steps: int
    whole: bool
    """False: after a start, the records are still read; ask again."""
    width: int
    """Steps in a bucket."""
    step: list[int]
    """The last step of each bucket."""
    metrics: dict[str, CurveView]
    """See docs/reference/metrics.md."""
    marks: list[MarkView]


class MemorySampleView(ResponseModel):
    """What a process held on a device during a phase, at its peak."""

    device: str
    """Host, and GPU or ``cpu``."""
    phase: str
    ended_at_s: float
    """Unix seconds."""
    seconds: float
    total_bytes: float
    capacity_bytes: float
    """Of the device."""
    components: dict[str, float]
    """Bytes, by the names of ``penstock plan``."""


class MemoryView(ResponseModel):
    """A process's report: the largest sample of each phase since the one before."""

    id: str
    """Stream entry id."""
    replica: str
    samples: list[MemorySampleView]


class ScoreView(ResponseModel):
    """One scorer's result for a completion."""

    status: ScoreStatus
    """ok, or why there is no value."""
    value: float | None
    detail: Sentence


class CallView(ResponseModel):
    """A call of a tool."""

    name: str
    arguments: str
    """JSON, or what the policy wrote instead."""


class TurnView(ResponseModel):
    """A message of an episode: an answer of the policy, or one that was given, which is never trained."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallView, ...] = ()
    turn: int | None = None
    """Number of the answer; null: given."""
    tokens: int | None = None
    versions: tuple[int, ...] = ()
    reward: float | None = None
    """Of this turn."""
    seconds: float | None = None
    """Until an answer was drawn; of the first message given after an answer: until the next one was asked for."""
    fork: Literal["", "history", "template"] = ""
    """Why its history is a branch: of other messages than were sent, or written otherwise by the template."""
    after: int | None = None
    """Of a branch: the answer that it continues."""


class CompletionView(ResponseModel):
    """One completion of a group."""

    text: str
    """Or what `?excerpt=` asked for."""
    characters: int
    """Of the whole text."""
    reward: float | None
    """Null: not finite."""
    scores: dict[str, ScoreView]
    tokens: int
    finish_reason: FinishReason
    versions: list[int]
    """Policy versions that generated it."""
    ended: str = ""
    """Of an episode: how it ended."""
    turns: tuple[TurnView, ...] = ()
    """Of an episode; empty with `?excerpt=`."""


class Turn(ResponseModel):
    """One message of a conversation."""

    role: str
    content: Any


class RolloutView(ResponseModel):
    """A trained group."""

    id: str
    """Journal entry id."""
    step: int
    """Optimizer step that trained it."""
    version: int | None = None
    """Policy version that this step made; null: in older records."""
    group: int
    problem: str
    """Place in the dataset, `file:line`."""
    row_id: str
    """Digest of its question and answer, wherever its row is."""
    prompt: str | list[Turn] | None
    """Text or conversation."""
    answer: str | None
    replica: str
    has_tokens: bool = False
    """Whether values of its completions' tokens are recorded: `GET /v1/run/rollouts/{entry}/tokens`."""
    completions: list[CompletionView]


class TokensView(ResponseModel):
    """Tokens of a completion; each list has one entry for each token."""

    total: int
    """Tokens of the completion."""
    first: int
    """Index of the first one given here."""
    ids: list[int]
    texts: list[str] | None
    """What each adds to the text, "" where the next one completes its character; null: the model has no tokenizer."""
    logprobs: list[float | None]
    """The engine's, in nats; null: not sampled."""
    trainer_logprobs: list[float | None]
    """The trainer's, in the token's first forward pass of the step; null: not trained."""
    versions: list[int]
    """Policy version that sampled it."""


def tokens_view(values: Any, first: int, limit: int) -> TokensView:
    """Return ``limit`` tokens of a completion's record (``shared.files.token_records``).

    Raises:
        KeyError, TypeError, ValidationError: from another version.
    """
    lists = ("ids", "texts", "logprobs", "trainer_logprobs", "versions")
    shown = {name: values[name] and values[name][first : first + limit] for name in lists}
    return TokensView.model_validate({"total": len(values["ids"]), "first": first, **shown})


def rollout_view(line: Mapping[str, Json]) -> RolloutView:
    """Return a rollouts.jsonl line as a view.

    Raises:
        KeyError, ValidationError: from another version.
    """
    view: dict[str, Any] = {**line, "id": line["entry"]}
    completions: Any = line["completions"]
    view["completions"] = [{**each, "characters": len(each["text"])} for each in completions]
    return RolloutView.model_validate(view)


def excerpt(rollout: RolloutView, characters: int, search: str = "", *, turns: bool = False) -> RolloutView:
    """Return a group with at most ``characters`` of each completion: around ``search``, else the end; with ``turns``, of
    each message, too.
    """
    completions = [
        each.model_copy(
            update={
                "text": _part(each.text, characters, search),
                "turns": tuple(
                    turn.model_copy(update={"content": turn.content[:characters]}) for turn in each.turns if turns
                ),
            }
        )
        for each in rollout.completions
    ]
    return rollout.model_copy(update={"completions": completions})


def _part(text: str, characters: int, search: str) -> str:
    hit = text.casefold().find(search) if search else -1
    start = len(text) - characters if hit < 0 else min(hit - characters // 4, len(text) - characters)
    return text[max(0, start) :][:characters]
