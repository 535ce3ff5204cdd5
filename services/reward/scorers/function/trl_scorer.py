"""Score with reward functions written for TRL or verifiers, called for each group in killable processes (docs/rewards.md)."""

import asyncio
import base64
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client import Gauge

from penstock.services.reward.scorers.function.trl_call import unused
from penstock.services.reward.scorers.scorer import unavailable, valued
from penstock.services.reward.subprocess_pool.pool import Crashed, NotReady, Overdue, Processes
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Json, RolloutGroup, Score, ScoreStatus
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.settings.rewards.scorers import TrlScorer

LOGGED = Gauge(
    "penstock_reward_logged",
    "Newest value that a TRL reward function logged by log_metric, or mean of a verifiers function's values.",
    ["scorer", "metric"],
)


_NO_METRIC = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that trackers refuse in a metric's name."""
_PROGRAMS = {"trl": "trl_call", "verifiers": "rubric_call"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    """One function's values of a group, or why they do not exist."""

    name: str
    values: Sequence[float | None] = ()
    extra: Sequence[str] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, Sequence[float | None]] = dataclasses.field(default_factory=dict)
    """Values of the functions of a rubric."""
    failure: str = ""


class TrlFunctions:
    """``answer_field``: the column that ``Prompt.answer`` was read from. ``steps``: ``trainer_state.max_steps``."""

    def __init__(self, scorer: TrlScorer, answer_field: str, steps: int) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._asked: dict[str, Json] = {"answer_field": answer_field, "steps": steps}
        program = f"penstock.services.reward.scorers.function.{_PROGRAMS[scorer.kind]}"
        command = (sys.executable, "-m", program, *scorer.functions)
        self._processes = Processes(command, scorer.processes, scorer.name, scorer.environment)
        self._weights = np.array(scorer.weights or [1.0] * len(scorer.functions), dtype=np.float32)

    async def start(self) -> None:
        try:
            await self._processes.warm()
        except NotReady as error:
            raise SettingsError(
                f"expected reward functions {', '.join(self._scorer.functions)} for scorer {self.name!r}, found {error}: "
                "change functions in [[reward.scorers]], or PYTHONPATH"
            ) from error

    async def close(self) -> None:
        await self._processes.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        encoded = base64.b64encode(wire.encode(group)).decode()
        columns = await asyncio.gather(*(self._call(index, encoded) for index in range(len(self._weights))))
        if failures := [column.failure for column in columns if column.failure]:
            return [unavailable(self.name, failures[0]) for _ in group.samples]
        for column in columns:
            for metric, value in column.metrics.items():
                LOGGED.labels(self.name, metric).set(value)
        rewards = self._sums(columns)
        return [self._score(columns, index, reward) for index, reward in enumerate(rewards)]

    def _sums(self, columns: Sequence[_Column]) -> list[float]:
        """Return TRL's ``(rewards_per_func * weights).nansum(dim=1)``, in float32 as there."""
        table = np.array([column.values for column in columns], dtype=np.float32)
        return [float(reward) for reward in np.nansum(table * self._weights[:, None], axis=0)]

    def _score(self, columns: Sequence[_Column], index: int, reward: float) -> Score:
        if all(column.values[index] is None for column in columns):
            names = ", ".join(column.name for column in columns)
            return unavailable(self.name, f"no function has a reward for completion {index}: None from {names}")
        each = [f"{column.name} {_shown(column.values[index])}" for column in columns] if len(columns) > 1 else []
        extra = [column.extra[index] for column in columns if column.extra[index]]
        return valued(self.name, ScoreStatus.OK, reward, "; ".join([*each, *extra]), _parts(columns, index))

    async def _call(self, index: int, group: str) -> _Column:
        name = self._scorer.functions[index].partition(":")[2].partition("(")[0]
        question: dict[str, Json] = {**self._asked, "function": index, "group": group}
        try:
            answer: Mapping[str, Any] = await self._processes.ask(question, self._scorer.timeout_s)
        except Overdue as error:
            return _Column(name, failure=f"{name}: {error} (timeout_s)")
        except (Crashed, TemporaryError) as error:
            return _Column(name, failure=f"{name}: {error}")
        if "error" in answer:
            return _Column(name, failure=f"{name}: {answer['error']}")
        return _Column(name, answer["values"], answer["extra"], answer["metrics"], answer["parts"])


def _parts(columns: Sequence[_Column], index: int) -> dict[str, float]:
    """Return the values of a completion by function, if there are several; functions of one name are numbered."""
    values: dict[str, float | None] = {}
    for name, of_function in (
        part for column in columns for part in (column.parts or {column.name: column.values}).items()
    ):
        values[unused(_NO_METRIC.sub("_", name), values)] = of_function[index]
    return {name: value for name, value in values.items() if value is not None} if len(values) > 1 else {}


def _shown(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"
