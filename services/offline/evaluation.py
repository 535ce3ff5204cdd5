"""Evaluate a policy on the held-out sets of ``evaluation``, with the run's scorers and without a run."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from penstock.services.coordinator.admission import dataset
from penstock.services.coordinator.admission.admission import drawn_by
from penstock.services.coordinator.evaluation.results import Evaluation, played_in, summarize
from penstock.services.offline.episodes import player
from penstock.services.offline.generation import LocalPolicy
from penstock.services.reward.scoring import Scoring
from penstock.services.reward.service import make_scoring
from penstock.shared.bus.messages import PolicyVersion, Prompt, RolloutGroup
from penstock.shared.bus.stores.policy.evaluations import Description, EvaluationRequest, Played
from penstock.shared.errors import PermanentError, TemporaryError
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from penstock.shared.settings.evaluation import HeldOutSet
from penstock.shared.settings.rewards.scorers import AnswerScorer

T = TypeVar("T")
_TRIES, _AGAIN_S = 5, 1.0


def evaluate(
    settings: Settings,
    version: int,
    step: int,
    most: int | None = None,
    tell: Callable[[HeldOutSet, dataset.Dataset], None] = lambda *_: None,
) -> list[Evaluation]:
    """Return the results of each held-out set.

    Args:
        most: problems of a set; None: all.
        tell: called with each set that has been read.

    Raises:
        SettingsError: a model, a scorer or data that cannot be used.
        TemporaryError: a scorer does not work.
    """
    sets = [(held_set, _problems(settings, held_set, most, tell)) for held_set in settings.evaluation.held_out]
    policy = LocalPolicy(settings, version)
    return asyncio.run(_evaluate(settings, policy, sets, version, step))


async def _evaluate(
    settings: Settings,
    policy: LocalPolicy,
    sets: list[tuple[HeldOutSet, list[dataset.Problem]]],
    version: int,
    step: int,
) -> list[Evaluation]:
    scoring = make_scoring(settings, Status())
    started_at_s, refusals, first = time.time(), list[str](), 0
    answers, played = dict[int, int](), dict[int, Played]()
    await scoring.start()
    try:
        for held_set, problems in sets:
            prompts = _prompts(settings, held_set, problems, first)
            async with contextlib.aclosing(_groups(settings, policy, prompts, refusals)) as groups:
                async for group in groups:
                    try:
                        rewards = await _patiently(functools.partial(_rewards, scoring, group))
                    except PermanentError as error:
                        refusals.append(str(error))
                        continue
                    problem = int(group.prompt.group_id)
                    answers[problem] = sum(reward > held_set.correct_above for reward in rewards)
                    if (sums := played_in(group)) is not None:
                        played[problem] = sums
            first += len(problems)
    finally:
        await scoring.close()
    asked = tuple(
        EvaluationRequest(each.name, len(problems), each.samples, each.correct_above, each.pass_at)
        for each, problems in sets
    )
    description = Description(
        PolicyVersion(version), step, asked, initial=False, final=False, started_at_s=started_at_s
    )
    return summarize(description, answers, f"({refusals[0]})" if refusals else "", time.time(), played)


def _prompts(settings: Settings, held_set: HeldOutSet, problems: list[dataset.Problem], first: int) -> list[Prompt]:
    sampling = drawn_by(settings.sampling, held_set.samples, held_set.temperature)
    return [problem.prompt(first + place, sampling) for place, problem in enumerate(problems)]


def _accepted(policy: LocalPolicy, prompts: list[Prompt], refusals: list[str]) -> list[Prompt]:
    """Return the prompts that can be generated; add the others' reasons to ``refusals``."""
    accepted = []
    for prompt in prompts:
        try:
            policy.check(prompt)
        except PermanentError as error:
            refusals.append(str(error))
        else:
            accepted.append(prompt)
    return accepted


async def _groups(
    settings: Settings, policy: LocalPolicy, prompts: list[Prompt], refusals: list[str]
) -> AsyncGenerator[RolloutGroup, None]:
    """Yield the prompts' groups; add to ``refusals`` why others have none."""
    if not settings.episodes.is_on:
        for group in policy.complete(_accepted(policy, prompts, refusals)):
            yield group
        return
    async with player(settings, policy) as play:
        playing = [asyncio.create_task(_patiently(functools.partial(play, prompt))) for prompt in prompts]
        try:
            for next_played in asyncio.as_completed(playing):
                try:
                    group = await next_played
                except (TemporaryError, PermanentError) as error:
                    refusals.append(str(error))
                else:
                    yield group
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)


async def _rewards(scoring: Scoring, group: RolloutGroup) -> list[float]:
    return [float(reward) for reward in (await scoring(group)).rewards]


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Return what ``work`` does; after a failure for a moment it is done again."""
    for left in reversed(range(_TRIES)):
        try:
            return await work()
        except TemporaryError:
            if not left:
                raise
            await asyncio.sleep(_AGAIN_S)
    raise AssertionError("unreachable")


def _problems(
    settings: Settings, held_set: HeldOutSet, most: int | None, tell: Callable[[HeldOutSet, dataset.Dataset], None]
) -> list[dataset.Problem]:
    names = [scorer.name for scorer in settings.reward.scorers]
    comparing = [scorer for scorer in settings.reward.scorers if isinstance(scorer, AnswerScorer)]
    setting = settings.evaluation.setting_of(held_set)
    loaded = dataset.load(held_set.path, settings.data, setting, names, comparing)
    tell(held_set, loaded)
    chosen = dataset.subset(len(loaded), len(loaded) if most is None else most, settings.run.seed)
    return [loaded.problems[index] for index in chosen]
