"""The reward service: a group of samples comes in, every scorer says what it thinks of them at once, experience goes out.

::

    rollouts ──────▶ Worker ──▶ Scoring ──▶ experience              eval_rollouts ──▶ the same ──▶ eval_results
                                 ├── scorer ┐
                                 ├── scorer ├──▶ reward.expression ──▶ rewards
                                 ├── scorer ┘
                                 └── reference, where it lives here ──▶ reference logprobs
                                      └── unavailable ──▶ TemporaryError: tried again, then buried; never worth 0

It holds nothing that it could lose: a group that was not handed over is scored again by whoever takes it.
"""

import asyncio
import logging
import time
from collections import Counter as Tally
from collections.abc import Sequence

import numpy as np
from prometheus_client import Counter, Gauge, Histogram

from services.reward.answer import AnswerMatcher
from services.reward.code.scorer import CodeTester
from services.reward.format import FormatChecker
from services.reward.function import FunctionScorer
from services.reward.judge import Judge
from services.reward.lot import Lot
from services.reward.model import RewardModel
from services.reward.normalisation import Normaliser
from services.reward.reference import Reference
from services.reward.scorer import Scorer
from shared import streams
from shared.bus import Bus
from shared.errors import PermanentError, TemporaryError
from shared.expression import Expression
from shared.messages import Experience, Float32Array, Prompt, Purpose, RolloutGroup, SampleScores, Score, ScoreStatus
from shared.service import Context, serve
from shared.settings import Settings
from shared.settings.reward_models import ModelScorer
from shared.settings.scorers import AnswerScorer, CodeScorer, FormatScorer, JudgeScorer, PythonScorer, RandomScorer
from shared.settings.scorers import Scorer as ScorerSettings
from shared.telemetry import Status
from shared.worker import Worker

log = logging.getLogger(__name__)

_VALUES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SAMPLES = Counter("penstock_reward_samples_scored_total", "Samples scored, by what was said.", ["scorer", "status"])
SECONDS = Histogram(
    "penstock_reward_score_seconds", "Time that a scorer took for one group.", ["scorer"], buckets=_SECONDS
)
VALUE = Histogram("penstock_reward_value", "Values that a scorer gave to samples.", ["scorer"], buckets=_VALUES)
GROUP_MEAN = Gauge("penstock_reward_group_mean", "Mean reward of the newest group.")
IN_PROGRESS = Gauge("penstock_reward_groups_in_progress", "Groups that are being scored now.")
SCORER_AVAILABLE = Gauge("penstock_reward_scorer_available", "1 while a scorer does its work, else 0.", ["scorer"])


def make_scorer(scorer: ScorerSettings, settings: Settings, bus: Bus | None = None) -> Scorer:
    """Return the scorer of one ``[[reward.scorers]]`` table; without a bus, one that is only checked.

    Raises:
        SettingsError: it cannot work as it is configured.
    """
    match scorer:
        case AnswerScorer():
            return AnswerMatcher(scorer, settings.data.answer_field)
        case FormatScorer():
            return FormatChecker(scorer)
        case ModelScorer():
            running = bus is not None and scorer.normalise == "running"
            return RewardModel(scorer, Normaliser(bus, scorer.name) if running and bus is not None else None)
        case PythonScorer():
            return FunctionScorer(scorer)
        case JudgeScorer():
            return Judge(scorer)
        case RandomScorer():
            return Lot(scorer.name, settings.run.seed)
        case CodeScorer():
            return CodeTester(scorer, settings.reward.executor.address)


class Scoring:
    """Turn groups into experience; ``status`` says which scorers are down.

    Args:
        scorers: all are asked about every group, at once.
        expression: the reward from their values.
        status: what this replica's heartbeat says.
        reference: the frozen initial policy, where it lives in this service.
    """

    def __init__(
        self, scorers: Sequence[Scorer], expression: Expression, status: Status, reference: Reference | None = None
    ) -> None:
        self._scorers = scorers
        self._reference = reference
        self._expression = expression
        self._status = status
        self._down: dict[str, str] = {}
        self._groups = 0
        self._samples = 0
        for name in (*(scorer.name for scorer in scorers), *([reference.name] if reference else [])):
            SCORER_AVAILABLE.labels(name).set(1)

    def reward_by(self, settings: Settings) -> None:
        """Take the expression of ``settings`` for the groups from now on."""
        self._expression = Expression(settings.reward.expression, [scorer.name for scorer in self._scorers])

    async def start(self) -> None:
        """Let every scorer load what it needs.

        Raises:
            SettingsError: one can never work.
        """
        for scorer in self._parts():
            await scorer.start()
            SCORER_AVAILABLE.labels(scorer.name).set(1)
        self._status.state = "working"

    async def close(self) -> None:
        """Close every scorer."""
        for scorer in self._parts():
            await scorer.close()

    def _parts(self) -> list[Scorer | Reference]:
        return [*self._scorers, *([self._reference] if self._reference is not None else [])]

    async def __call__(self, group: RolloutGroup) -> Experience:
        """Return the group with its rewards.

        Raises:
            TemporaryError: a scorer could not do its work now.
            PermanentError: the group can never be scored, or its reward is no finite number.
        """
        if not group.samples:
            raise PermanentError(f"expected samples of {group.prompt.problem}, found none")
        started_s = time.monotonic()
        with IN_PROGRESS.track_inprogress():
            columns, reference_logprobs = await self._ask(self._applying(group.prompt), group)
        self._note(columns)
        scores = tuple(SampleScores(row) for row in zip(*columns, strict=True))
        rewards = np.array([self._reward(sample) for sample in scores], dtype=np.float32)
        self._count(rewards)
        return Experience(
            group=group,
            rewards=rewards,
            scores=scores,
            scored_at_s=time.time(),
            score_s=time.monotonic() - started_s,
            reference_logprobs=reference_logprobs,
        )

    def _applying(self, prompt: Prompt) -> Sequence[Scorer]:
        """Return the scorers that apply to a prompt, in the order of the settings."""
        if not prompt.scorers:
            return self._scorers
        known = {scorer.name for scorer in self._scorers}
        if unknown := [name for name in prompt.scorers if name not in known]:
            raise PermanentError(
                f"expected scorers of this run ({', '.join(sorted(known))}) for {prompt.problem}, found {unknown[0]!r}: "
                "change the column data.scorers_field, or name it in [[reward.scorers]]"
            )
        return [scorer for scorer in self._scorers if scorer.name in prompt.scorers]

    async def _ask(
        self, scorers: Sequence[Scorer], group: RolloutGroup
    ) -> tuple[list[list[Score]], Float32Array | None]:
        """Return what each scorer says, and the reference's logprobs, all asked at once.

        Where one raises, the others still finish: what they are doing may be costly to break off.
        """
        asked = asyncio.gather(*(_timed(scorer, group) for scorer in scorers), return_exceptions=True)
        answers, logprobs = await asyncio.gather(asked, self._look_back(group), return_exceptions=True)
        columns: list[list[Score]] = []
        for answer in [answers] if isinstance(answers, BaseException) else answers:
            if isinstance(answer, BaseException):
                raise answer
            assert len(answer) == len(group.samples)
            columns.append(answer)
        if isinstance(logprobs, BaseException):
            raise logprobs
        return columns, logprobs

    async def _look_back(self, group: RolloutGroup) -> Float32Array | None:
        """Return the reference's logprobs of a group that will be trained on.

        Raises:
            TemporaryError: it could not do its work now.
        """
        if self._reference is None or group.prompt.purpose is Purpose.EVALUATE:
            return None
        started_s = time.monotonic()
        try:
            found = await self._reference.logprobs(group)
        except TemporaryError as error:
            self._set_available(self._reference.name, str(error))
            raise
        SECONDS.labels(self._reference.name).observe(time.monotonic() - started_s)
        self._set_available(self._reference.name, None)
        return found

    def _note(self, columns: list[list[Score]]) -> None:
        """Tell the heartbeat which scorers are down.

        Raises:
            TemporaryError: one of this group's scores is missing.
        """
        missing: list[Score] = []
        for column in columns:
            lost = [score for score in column if score.status is ScoreStatus.UNAVAILABLE]
            missing += lost[:1]
            self._set_available(column[0].scorer, lost[0].detail if lost else None)
        if missing:
            raise TemporaryError(f"scorer {missing[0].scorer!r} unavailable: {missing[0].detail}")

    def _set_available(self, scorer: str, problem: str | None) -> None:
        if (problem is None) == (scorer not in self._down):
            return
        SCORER_AVAILABLE.labels(scorer).set(problem is None)
        if problem is None:
            del self._down[scorer]
            log.info("scorer available again", extra={"scorer": scorer})
        else:
            self._down[scorer] = problem
            log.warning("scorer unavailable", extra={"scorer": scorer, "reason": problem})
        self._status.state = "degraded" if self._down else "working"
        self._status.last_error = "; ".join(f"scorer {name!r}: {reason}" for name, reason in self._down.items())

    def _reward(self, sample: SampleScores) -> float:
        values = {score.scorer: score.value for score in sample.scores if score.value is not None}
        return self._expression(values)

    def _count(self, rewards: np.typing.NDArray[np.float32]) -> None:
        self._groups += 1
        self._samples += len(rewards)
        GROUP_MEAN.set(float(rewards.mean()))
        self._status.values |= {"groups_scored": float(self._groups), "samples_scored": float(self._samples)}


async def _timed(scorer: Scorer, group: RolloutGroup) -> list[Score]:
    started_s = time.monotonic()
    scores = await scorer.score(group)
    SECONDS.labels(scorer.name).observe(time.monotonic() - started_s)
    for status, count in Tally(score.status for score in scores).items():
        SAMPLES.labels(scorer.name, status.value).inc(count)
    value = VALUE.labels(scorer.name)
    for score in scores:
        if score.value is not None:
            value.observe(score.value)
    return scores


def make_scoring(settings: Settings, status: Status, bus: Bus | None = None) -> Scoring:
    """Return the scorers, the expression and the reference of a run, checked; without a bus, only for the check.

    Raises:
        SettingsError: a scorer or reward.expression is wrong.
    """
    scorers = [make_scorer(scorer, settings, bus) for scorer in settings.reward.scorers]
    expression = Expression(settings.reward.expression, [scorer.name for scorer in scorers])
    reference = Reference(settings) if settings.algorithm.reference_travels else None
    return Scoring(scorers, expression, status, reference)


async def work(context: Context, scoring: Scoring) -> None:
    """Score groups of the run and of its evaluations until told to stop."""
    workers = [
        Worker(
            bus=context.bus,
            consumer=context.replica,
            source=source,
            kind=RolloutGroup,
            output=output,
            handler=scoring,
            concurrency=context.settings.reward.max_groups,
            patience=context.patience,
            taking=context.cordon.taking,
        )
        for source, output in (
            (streams.ROLLOUTS, streams.EXPERIENCE),
            (streams.EVAL_ROLLOUTS, streams.EVAL_RESULTS),
        )
    ]
    async with asyncio.TaskGroup() as running:
        for worker in workers:
            running.create_task(worker.run(context.stop))


async def run(settings: Settings, replica: str) -> None:
    """Run one reward replica until it is told to stop.

    Raises:
        SettingsError: the settings are wrong.
        BusUnavailable: no bus at the start.
    """
    make_scoring(settings, Status())  # wrong settings are told before anything is waited for
    async with serve(settings, "reward", replica, settings.reward.metrics_port) as context:
        scoring = make_scoring(await context.live.refresh(), context.status, context.bus)
        context.live.listen(scoring.reward_by)
        try:
            await scoring.start()
            await work(context, scoring)
            context.status.state = "stopping"
        finally:
            await scoring.close()
