"""The scorer protocol: score every sample of a group.

A new kind implements it and adds one line to :func:`penstock.services.reward.service.make_scorer`.

A score without a value means only that the scorer could not work. A wrong or crashing completion is worth 0.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from penstock.shared.bus.messages import FinishReason, RolloutGroup, Sample, Score, ScoreStatus

_LONGEST_DETAIL = 200


class Scorer(Protocol):
    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Load resources. Raises SettingsError: it can never work as configured or installed."""
        ...

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Return one score per sample, in order; many calls run concurrently. A sample that cannot be scored now gets
        status ``UNAVAILABLE``, not an exception. Raises PermanentError: the group can never be scored.
        """
        ...

    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Return value of a user's scorer, instead of a number (docs/rewards.md). Raises ValueError: status
    ``UNAVAILABLE``; use ``value=None``.
    """

    value: float | None
    """None: cannot be scored now; the group is retried."""
    detail: str = ""
    status: ScoreStatus = ScoreStatus.OK
    """For metrics only, for example ``wrong_format``."""

    def __post_init__(self) -> None:
        if self.status == ScoreStatus.UNAVAILABLE:
            raise ValueError("expected value=None with the status 'unavailable'")


def valued(
    scorer: str, status: ScoreStatus, value: float, detail: str = "", parts: Mapping[str, float] | None = None
) -> Score:
    assert status is not ScoreStatus.UNAVAILABLE
    return Score(scorer, status, value, _writable(detail), parts=dict(parts or {}))


def unavailable(scorer: str, detail: str) -> Score:
    return Score(scorer, ScoreStatus.UNAVAILABLE, None, _writable(detail))


def _writable(detail: str) -> str:
    """Return what fits into a message: half of a surrogate pair, which JSON may contain, has no UTF-8."""
    return detail[:_LONGEST_DETAIL].encode(errors="replace").decode()


def is_cut(sample: Sample) -> bool:
    """Whether the completion ended at its length limit."""
    return sample.finish_reason is FinishReason.LENGTH
