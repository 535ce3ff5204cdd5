"""What the HTTP API and ``report.html`` say of what was trained: the report of each step, and groups with their scores."""

from collections.abc import Mapping
from typing import Any

from services.coordinator.schemas.run import ResponseModel
from shared.bus.messages import FinishReason, Json, ScoreStatus


class StepView(ResponseModel):
    """What the trainer reported of one optimizer step."""

    id: str
    """Its place among the reports."""
    step: int
    """Optimizer step."""
    version: int
    """The policy version that it made."""
    finished_at_s: float
    """When it was committed, Unix time."""
    samples: int
    """Samples that it trained on."""
    lag_counts: dict[str, int]
    """Those samples by lag in steps."""
    metrics: dict[str, float | None]
    """What was measured; docs/reference/metrics.md has every name. Null: not finite."""


class ScoreView(ResponseModel):
    """What one scorer said of a completion."""

    status: ScoreStatus
    """ok, or why there is no value."""
    value: float | None
    """Its value; null where there is none."""
    detail: str
    """What it found, for people."""


class CompletionView(ResponseModel):
    """One completion of a group."""

    text: str
    """What the policy wrote."""
    reward: float | None
    """Its reward; null: not finite."""
    scores: dict[str, ScoreView]
    """What each scorer said, by name."""
    tokens: int
    """Its length."""
    finish_reason: FinishReason
    """Why it ended."""
    versions: list[int]
    """The policy versions that wrote it."""


class Turn(ResponseModel):
    """One message of a conversation."""

    role: str
    """Who speaks."""
    content: Any
    """What is said."""


class RolloutView(ResponseModel):
    """A group that was trained on: a problem and its completions."""

    id: str
    """Its place in the journal."""
    step: int
    """The optimizer step that used it."""
    group: int
    """The group's number."""
    problem: str
    """The problem's name in the dataset."""
    prompt: str | list[Turn] | None
    """What was asked: text, or a conversation."""
    answer: str | None
    """The reference answer, where there is one."""
    replica: str
    """Who generated it."""
    completions: list[CompletionView]
    """Its samples."""


def rollout_view(line: Mapping[str, Json]) -> RolloutView:
    """Return a line of rollouts.jsonl as the page reads it; its numbers are finite.

    Raises:
        KeyError, ValidationError: it is of another version.
    """
    return RolloutView.model_validate({**line, "id": line["entry"]})
