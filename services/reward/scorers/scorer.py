"""What a scorer is: something that says, for every sample of a group, what it is worth and how sure that is.

All scorers of a run are asked about a group at once. A new kind (a code executor, a reward model, a judge) is a class
with these four members and one line in :func:`services.reward.service.make_scorer`; nothing else knows the kinds.

A score without a value means "I could not do my work" and nothing else; a completion that is wrong, malformed, or makes
its own check fail is worth 0.
"""

import dataclasses
from typing import Protocol

from shared.bus.messages import FinishReason, RolloutGroup, Sample, Score, ScoreStatus

_LONGEST_DETAIL = 200


class Scorer(Protocol):
    """One way to judge completions."""

    @property
    def name(self) -> str:
        """Its name in reward.expression, in scores and in metrics."""
        ...

    async def start(self) -> None:
        """Load what is slow to load.

        Raises:
            SettingsError: it can never work as it is configured or installed.
        """
        ...

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Return one score for each sample, in their order. Called for many groups at a time.

        What cannot be scored now is a score with status ``UNAVAILABLE``, not an exception.

        Raises:
            PermanentError: no scorer of this kind can ever score this group (its reference answer is missing, say).
        """
        ...

    async def close(self) -> None:
        """Give back what it holds: processes, devices, connections."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a user's own scorer may return instead of a number (docs/rewards.md).

    Raises:
        ValueError: the status is ``UNAVAILABLE``; say so with ``value=None``.
    """

    value: float | None
    """What the sample is worth; None: it could not be scored now, and its group is tried again."""
    detail: str = ""
    """Why, for people; kept with the sample."""
    status: ScoreStatus = ScoreStatus.OK
    """``wrong_format``, say, for metrics; it changes no value."""

    def __post_init__(self) -> None:
        if self.status == ScoreStatus.UNAVAILABLE:
            raise ValueError("expected value=None for what could not be scored, found the status 'unavailable'")


def valued(scorer: str, status: ScoreStatus, value: float, detail: str = "") -> Score:
    """Return a score that has a value."""
    assert status is not ScoreStatus.UNAVAILABLE
    return Score(scorer, status, value, detail[:_LONGEST_DETAIL])


def unavailable(scorer: str, detail: str) -> Score:
    """Return the score that says that there is none."""
    return Score(scorer, ScoreStatus.UNAVAILABLE, None, detail[:_LONGEST_DETAIL])


def is_cut(sample: Sample) -> bool:
    """Whether the completion ended at its length limit."""
    return sample.finish_reason is FinishReason.LENGTH
