"""Score a group: all scorers, the reference and teachers concurrently, then the reward expression."""

import asyncio
import dataclasses
import logging
import time
from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from prometheus_client import Counter, Gauge, Histogram

from penstock.services.reward.failures import AVAILABLE, HANDLER, Failures, Tell, part_of
from penstock.services.reward.models.reading import Reading
from penstock.services.reward.models.turns import Turns
from penstock.services.reward.reference import Reference
from penstock.services.reward.rehearsal import doubt, rehearse
from penstock.services.reward.scorers.reward_model import RewardModel
from penstock.services.reward.scorers.scorer import Scorer
from penstock.services.reward.teachers import Teacher, Teachers, taught
from penstock.shared.backoff import Backoff
from penstock.shared.bus.messages import (
    Experience,
    Float32Array,
    Prompt,
    Purpose,
    RolloutGroup,
    SampleScores,
    Score,
    ScoreStatus,
)
from penstock.shared.errors import PermanentError, TemporaryError
from penstock.shared.expression import Expression
from penstock.shared.process.memory_timeline import Held
from penstock.shared.process.telemetry import Status
from penstock.shared.reasoning import Reasoning
from penstock.shared.settings import Settings
from penstock.shared.traces import TRACES

log = logging.getLogger(__name__)

_VALUES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SAMPLES = Counter("penstock_reward_samples_scored_total", "Samples scored, by outcome.", ["scorer", "status"])
SECONDS = Histogram(
    "penstock_reward_score_seconds", "Time that a scorer took for one group.", ["scorer"], buckets=_SECONDS
)
LENIENT = Counter(
    "penstock_reward_lenient_total",
    "Samples whose value depends on a lenient rule of the scorer, by rule.",
    ["scorer", "rule"],
)

VALUE = Histogram("penstock_reward_value", "Values that a scorer gave to samples.", ["scorer"], buckets=_VALUES)
GROUP_MEAN = Gauge("penstock_reward_group_mean", "Mean reward of the newest group.")
IN_PROGRESS = Gauge("penstock_reward_groups_in_progress", "Groups that are being scored now.")
_EXPRESSION = "reward.expression"
_LOOK_EVERY_S = 1.0
_REDO, _REDO_TIMES = Backoff(0.5, 10.0), 4


def create_lenient_series(scorer: str, rules: Iterable[str]) -> None:
    """Create the series of ``rules`` at 0, so that a rate sees their first increment."""
    for rule in rules:
        LENIENT.labels(scorer, rule)


def _scored_places(columns: Sequence[Sequence[Score]]) -> list[int]:
    """Return the samples that every scorer scored."""
    rows = zip(*columns, strict=True)
    return [
        place for place, row in enumerate(rows) if all(score.status is not ScoreStatus.UNAVAILABLE for score in row)
    ]


def _raised(result: Reading | BaseException) -> Reading:
    if isinstance(result, BaseException):
        raise result
    return result


def _of_places(logprobs: Float32Array | None, group: RolloutGroup, places: Sequence[int]) -> Float32Array | None:
    if logprobs is None:
        return None
    parts = np.split(logprobs, np.cumsum([len(sample.token_ids) for sample in group.samples])[:-1])
    return np.concatenate([parts[place] for place in places])


def without_reasoning(group: RolloutGroup, reasoning: Reasoning) -> RolloutGroup:
    """Return the group with the answers of its completions as their texts."""
    answers = [dataclasses.replace(sample, text=reasoning.answer(sample.text)) for sample in group.samples]
    return dataclasses.replace(group, samples=tuple(answers))


class Scoring:
    """Turn groups into experience.

    Args:
        expression: the reward from the scorers' values.
        status: the replica's heartbeat.
        reference: the frozen initial policy, if it runs here.
        teachers: give the samples' ``teacher_logprobs``.
        tell: writes an event.
        redo: the waits before missing scores are asked for again.
        turns: when models have their device.
        answers_of: finds the reasoning that a scorer, by its name, does not read; others read whole completions.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        expression: Expression,
        status: Status,
        reference: Reference | None = None,
        tell: Tell | None = None,
        redo: Backoff = _REDO,
        teachers: Teachers | None = None,
        turns: Turns | None = None,
        answers_of: Mapping[str, Reasoning] | None = None,
    ) -> None:
        self._scorers = scorers
        self._turns = turns or Turns()
        self._answers_of = answers_of or {}
        self._redo_waits = redo
        self._reference = reference
        self._teachers = teachers
        self._expression = expression
        self._status = status
        models = [scorer.name for scorer in scorers if isinstance(scorer, RewardModel)]
        self._failures = Failures(status, tell, {part_of(name): self._turns.ready_s for name in models})
        self._groups = 0
        self._samples = 0
        self._turns.on_memory = self._note_memory
        for part in self._parts():
            AVAILABLE.labels(part.name).set(1)

    def reward_by(self, settings: Settings) -> None:
        """Use the expression of ``settings`` from now on."""
        self._expression = Expression(settings.reward.expression, [scorer.name for scorer in self._scorers])

    async def start(self) -> None:
        """Start every scorer. Raises SettingsError."""
        parts: list[Scorer | Reference] = [*self._scorers, *([self._reference] if self._reference is not None else [])]
        models = [part for part in parts if isinstance(part, RewardModel | Reference)]
        for part in parts:
            if part not in models:
                await part.start()
        for part in models:  # one after the other, so that a turn holds them all unless its device is asked back
            await part.start()
        if self._teachers is not None:
            await self._teachers.start()
        for name in (part.name for part in self._parts()):
            AVAILABLE.labels(name).set(1)

    async def rehearse(self, settings: Settings, prompts: Sequence[Prompt]) -> list[str]:
        """Try every scorer on ``prompts``, and return doubts. Raises SettingsError if one fails on all."""
        scorers = list(zip(settings.reward.scorers, self._scorers, strict=True))
        trials = await rehearse(scorers, prompts, self._failures)
        return [said for of, _ in scorers if (said := doubt(of, trials.get(of.name, ()), prompts))]

    async def close(self) -> None:
        for scorer in self._parts():
            await scorer.close()

    def _parts(self) -> list[Scorer | Teacher]:
        reference = [self._reference] if self._reference is not None else []
        return [*self._scorers, *reference, *(self._teachers.parts if self._teachers is not None else [])]

    async def __call__(self, group: RolloutGroup, *, last: bool = False) -> Experience:
        """Return the group with its rewards.

        Args:
            last: drop the samples of a training group that a scorer could not score, if at least half of
                those that its prompt asks for, and two, are left.

        Raises:
            TemporaryError: a scorer could not work now.
            PermanentError: the group can never be scored, or its reward is not finite.
        """
        if not group.samples:
            raise PermanentError(f"expected samples of {group.prompt.problem}, found none")
        started_s = time.monotonic()
        with IN_PROGRESS.track_inprogress():
            columns, reference_logprobs, group = await self._ask(self._applying(group.prompt), group)
        if missing := await self._note(columns, group.prompt.problem):
            scored, least = _scored_places(columns), max(2, group.prompt.sampling.samples / 2)
            if not last or group.prompt.purpose is not Purpose.TRAIN or len(scored) < least:
                raise TemporaryError(
                    f"scorer {missing.scorer!r} unavailable: {missing.detail} ({group.prompt.problem})"
                )
            dropped = len(group.samples) - len(scored)
            log.warning("samples dropped: no score", extra={"group": group.group_id, "samples": dropped})
            reference_logprobs = _of_places(reference_logprobs, group, scored)
            group = dataclasses.replace(group, samples=tuple(group.samples[place] for place in scored))
            columns = [[column[place] for place in scored] for column in columns]
        scores = tuple(SampleScores(row) for row in zip(*columns, strict=True))
        rewards = await self._rewards(scores, group.prompt.problem)
        self._count(rewards)
        self._failures.succeeded(HANDLER)
        scored_at_s, score_s = time.time(), time.monotonic() - started_s
        if group.prompt.purpose is Purpose.TRAIN:
            TRACES.add("scored", group.group_id, scored_at_s - score_s, scored_at_s, samples=len(group.samples))
        return Experience(
            group=group,
            rewards=rewards,
            scores=scores,
            scored_at_s=scored_at_s,
            score_s=score_s,
            reference_logprobs=reference_logprobs,
        )

    def _applying(self, prompt: Prompt) -> Sequence[Scorer]:
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
    ) -> tuple[list[list[Score]], Float32Array | None, RolloutGroup]:
        """Return all scores, the reference's logprobs, and the group with its teachers' logprobs.

        If one raises, the others still finish, since cancelling may be costly.
        """
        trained = group.prompt.purpose is not Purpose.EVALUATE
        models: list[Teacher] = [self._reference] if trained and self._reference is not None else []
        teachers = self._teachers.of(group) if trained and self._teachers is not None else []
        read = [self._part_read(scorer, group) for scorer in scorers]
        asked = asyncio.gather(*map(self._timed, scorers, read), return_exceptions=True)
        reading = asyncio.gather(*(self._read(model, group) for model in (*models, *teachers)), return_exceptions=True)
        answers, logprobs = await asyncio.gather(asked, reading)
        columns: list[list[Score]] = []
        for scorer, answer in zip(scorers, answers, strict=True):
            if isinstance(answer, BaseException):
                if isinstance(answer, (PermanentError, TemporaryError)):
                    await self._failures.failed(part_of(scorer.name), group.prompt.problem, str(answer))
                raise answer
            if len(answer) != len(group.samples):
                raise RuntimeError(
                    f"expected {len(group.samples)} scores of scorer {scorer.name!r}, found {len(answer)}: a bug in it"
                )
            columns.append(answer)
        readings = [_raised(part) for part in logprobs]
        return columns, readings[0].logprobs_N if models else None, taught(group, readings[len(models) :])

    def _part_read(self, scorer: Scorer, group: RolloutGroup) -> RolloutGroup:
        """Return the group with what the scorer reads of its completions."""
        reasoning = self._answers_of.get(scorer.name)
        return group if reasoning is None else without_reasoning(group, reasoning)

    async def _timed(self, scorer: Scorer, group: RolloutGroup) -> list[Score]:
        started_s = time.monotonic()
        with self._failures.calling(part_of(scorer.name), group.prompt.problem):
            scores = await self._redo(scorer, group, await scorer.score(group))
        SECONDS.labels(scorer.name).observe(time.monotonic() - started_s)
        for status, count in Tally(score.status for score in scores).items():
            SAMPLES.labels(scorer.name, status.value).inc(count)
        for rule, count in Tally(rule for score in scores for rule in score.lenient).items():
            LENIENT.labels(scorer.name, rule).inc(count)
        value = VALUE.labels(scorer.name)
        for score in scores:
            if score.value is not None:
                value.observe(score.value)
        return scores

    async def _redo(self, scorer: Scorer, group: RolloutGroup, scores: list[Score]) -> list[Score]:
        """Ask again for the samples without a score, if others have one: they alone are redone."""
        for attempt in range(1, _REDO_TIMES + 1):
            missing = [place for place, score in enumerate(scores) if score.status is ScoreStatus.UNAVAILABLE]
            if not 0 < len(missing) < len(scores) == len(group.samples):
                break
            detail = scores[missing[0]].detail
            self._failures.set_available(scorer.name, detail)
            await self._failures.failed(part_of(scorer.name), group.prompt.problem, detail)
            await asyncio.sleep(self._redo_waits.wait_s(attempt))
            again = await scorer.score(dataclasses.replace(group, samples=tuple(group.samples[i] for i in missing)))
            for place, score in zip(missing, again, strict=True):
                scores[place] = score
        return scores

    async def note_bug(self, group: str, error: str) -> None:
        """Record an exception that cost a group an attempt."""
        await self._failures.failed(HANDLER, f"group {group}", error)

    async def watch(self) -> None:
        """Report scorers that may hang, and the models' memory, until cancelled."""
        while True:
            self._failures.look()
            if not self._turns.is_shared:
                self._note_memory("score", _LOOK_EVERY_S)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _note_memory(self, phase: str, seconds: float) -> None:
        models = (part.held for part in self._parts() if isinstance(part, RewardModel | Reference))
        by_place: dict[tuple[str, float], list[Held]] = {}
        for held in filter(None, models):
            by_place.setdefault(held.place, []).append(held)
        for place, together in by_place.items():
            components = Tally[str]()
            for held in together:
                components.update(held.components)
            whole = Held(place, components, max(held.total_bytes for held in together))
            self._status.memory.note(whole.during(phase, seconds))
            if self._turns.is_shared:
                self._status.note_memory({"peak": max(held.peak_bytes for held in together)})

    async def _read(self, model: Teacher, group: RolloutGroup) -> Reading:
        """Return the logprobs of the samples' tokens under the reference or a teacher. Raises TemporaryError."""
        started_s = time.monotonic()
        try:
            reading = await model.read(group)
        except TemporaryError as error:
            self._failures.set_available(model.name, str(error))
            await self._failures.failed(model.name, group.prompt.problem, str(error))
            raise
        SECONDS.labels(model.name).observe(time.monotonic() - started_s)
        self._failures.set_available(model.name, None)
        self._failures.succeeded(model.name)
        return reading

    async def _note(self, columns: list[list[Score]], problem: str) -> Score | None:
        """Record successes and failures on the row ``problem``; return the first missing score."""
        missing: list[Score] = []
        for column in columns:
            lost = next((score for score in column if score.status is ScoreStatus.UNAVAILABLE), None)
            self._failures.set_available(column[0].scorer, lost.detail if lost else None)
            if lost is None:
                self._failures.succeeded(part_of(column[0].scorer))
            else:
                missing.append(lost)
                await self._failures.failed(part_of(lost.scorer), problem, lost.detail)
        return missing[0] if missing else None

    async def _rewards(self, scores: Sequence[SampleScores], problem: str) -> Float32Array:
        """Return the reward of each sample. Raises PermanentError."""
        try:
            rewards = np.array([self._reward(sample) for sample in scores], dtype=np.float32)
        except PermanentError as error:
            await self._failures.failed(_EXPRESSION, problem, str(error))
            raise
        self._failures.succeeded(_EXPRESSION)
        return rewards

    def _reward(self, sample: SampleScores) -> float:
        values = {score.scorer: score.value for score in sample.scores if score.value is not None}
        return self._expression(values)

    def _count(self, rewards: np.typing.NDArray[np.float32]) -> None:
        self._groups += 1
        self._samples += len(rewards)
        GROUP_MEAN.set(float(rewards.mean()))
        self._status.values |= {"groups_scored": float(self._groups), "samples_scored": float(self._samples)}
