"""The reward service turns rollout groups into experience.

::

    rollouts ──────▶ Worker ──▶ Scoring ──▶ experience              eval_rollouts ──▶ the same ──▶ eval_results
                                 ├── scorer ┐
                                 ├── scorer ├──▶ reward.expression ──▶ rewards
                                 ├── scorer ┘
                                 ├── reference, where it lives here ──▶ reference logprobs
                                 └── teachers ──▶ teacher logprobs of each sample
                                      └── unavailable, or a bug ──▶ tried again, then buried with the cause; never worth 0
"""

import asyncio
import contextlib
import functools
import gc
from collections.abc import AsyncIterator, Coroutine
from importlib import metadata
from typing import Any

from penstock.services.reward.models.call_watch import end_process
from penstock.services.reward.models.turns import ModelTurns, Turns
from penstock.services.reward.reference import Reference
from penstock.services.reward.rehearsal import rows
from penstock.services.reward.scorers.answer.scorer import AnswerMatcher
from penstock.services.reward.scorers.code.scorer import CodeTester
from penstock.services.reward.scorers.environment import EnvironmentReward
from penstock.services.reward.scorers.format.scorer import FormatChecker
from penstock.services.reward.scorers.function.function_call import ENTRY_POINTS
from penstock.services.reward.scorers.function.scorer import FunctionScorer
from penstock.services.reward.scorers.function.trl_scorer import TrlFunctions
from penstock.services.reward.scorers.judge.scorer import Judge
from penstock.services.reward.scorers.random_scorer import Lot
from penstock.services.reward.scorers.reward_model import RewardModel
from penstock.services.reward.scorers.scorer import Scorer
from penstock.services.reward.scoring import Scoring, create_lenient_series
from penstock.services.reward.teachers import Teachers
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.crowd import Crowd
from penstock.shared.bus.messages import RolloutGroup
from penstock.shared.bus.stores.run.functions import note_functions, reward_functions
from penstock.shared.bus.worker import Worker
from penstock.shared.errors import BusUnavailable, SettingsError
from penstock.shared.executor.client import read_executor_secret
from penstock.shared.expression import Expression
from penstock.shared.files.source import digest
from penstock.shared.placement.lease import lease_of, leased
from penstock.shared.process.importing import importing
from penstock.shared.process.service import Context, serve
from penstock.shared.process.telemetry import Status, tell, tell_changed
from penstock.shared.reasoning import Reasoning
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.models import ModelScorer
from penstock.shared.settings.rewards.scorers import (
    AnswerScorer,
    CodeScorer,
    EnvironmentScorer,
    FormatScorer,
    JudgeScorer,
    PythonScorer,
    RandomScorer,
    TrlScorer,
)
from penstock.shared.settings.rewards.scorers import Scorer as ScorerSettings
from penstock.shared.tasks import beside, together

_TELL_S = 2.0


def make_scorer(scorer: ScorerSettings, settings: Settings, turns: Turns | None = None) -> Scorer:
    """Return the scorer of one ``[[reward.scorers]]`` table. Raises SettingsError."""
    match scorer:
        case AnswerScorer():
            return AnswerMatcher(scorer, settings.data.answer_field)
        case FormatScorer():
            return FormatChecker(scorer)
        case ModelScorer():
            return RewardModel(scorer, settings.model_work, turns)
        case PythonScorer():
            return FunctionScorer(scorer)
        case TrlScorer():
            return TrlFunctions(scorer, settings.data.answer_field, settings.run.steps)
        case JudgeScorer():
            return Judge(scorer)
        case EnvironmentScorer():
            return EnvironmentReward(scorer.name)
        case RandomScorer():
            return Lot(scorer.name, settings.run.seed)
        case CodeScorer():
            executor = settings.reward.executor
            return CodeTester(scorer, executor.address, read_executor_secret(executor))


def make_scoring(settings: Settings, status: Status, bus: Bus | None = None, turns: Turns | None = None) -> Scoring:
    """Return the checked scoring of a run; without a bus, only for the check. ``turns``: when its models have their device.
    Raises SettingsError.
    """
    scorers = [make_scorer(scorer, settings, turns) for scorer in settings.reward.scorers]
    for of in settings.reward.scorers:
        if isinstance(of, AnswerScorer):
            create_lenient_series(of.name, (*of.lenient, *(("tolerance",) if of.tolerance else ())))
    expression = Expression(settings.reward.expression, [scorer.name for scorer in scorers])
    reference = Reference(settings, turns=turns) if settings.algorithm.reference_travels else None
    teller, teachers = None if bus is None else functools.partial(tell, bus, "reward"), Teachers(settings, turns)
    reasoning = Reasoning(settings.reward.reasoning_markers)
    answers_of = {of.name: reasoning for of in settings.reward.scorers if of.reads_answer}
    return Scoring(
        scorers, expression, status, reference, teller, teachers=teachers, turns=turns, answers_of=answers_of
    )


async def work(context: Context, scoring: Scoring) -> None:
    crowd = Crowd()
    workers = [
        Worker(
            bus=context.bus,
            consumer=context.replica,
            source=source,
            kind=RolloutGroup,
            output=output,
            handler=scoring,
            last=functools.partial(scoring, last=True),
            concurrency=_room(context.settings),
            patience=context.patience,
            taking=context.cordon.taking,
            crowd=crowd,
            bug=scoring.note_bug,
        )
        for source, output in (
            (streams.ROLLOUTS, streams.EXPERIENCE),
            (streams.EVAL_ROLLOUTS, streams.EVAL_RESULTS),
        )
    ]
    await together(worker.run(context.stop) for worker in workers)


def _room(settings: Settings) -> int:
    """Return the groups that are scored at a time; where models take turns, at least a batch."""
    groups = settings.algorithm.groups_per_step if settings.scores_in_turns else 0
    return max(settings.internal.reward_groups, groups)


async def run(settings: Settings, replica: str) -> None:
    make_scoring(settings, Status())  # report wrong settings before waiting for anything
    async with serve(settings, "reward", replica) as context, _turns(context) as turns:
        scoring = make_scoring(await context.live.refresh(), context.status, context.bus, turns)
        context.live.listen(scoring.reward_by)
        watching = asyncio.create_task(scoring.watch())
        try:
            context.status.start.begin("opening the scorers")
            if await _unless_stopped(context, scoring.start()):
                await _note_functions(context)
                gc.freeze()  # exempt libraries and scorers from collections that block the event loop
                if await _rehearsed(context, scoring):
                    await work(context, scoring)
            context.status.state = "stopping"
        finally:
            watching.cancel()
            await scoring.close()


@contextlib.asynccontextmanager
async def _turns(context: Context) -> AsyncIterator[Turns]:
    """Let models take turns on the device that they share, if they do. Raises Fenced: another process was granted it."""
    lease, turns = lease_of(context, "score"), Turns()
    if lease.is_shared:
        context.status.start.begin("importing the models' libraries")
        await asyncio.to_thread(_import_libraries)
        room = _room(context.settings)
        turns = ModelTurns(lease, context.bus, context.status, lambda: context.live.settings.algorithm, room)
    async with leased(lease), turns.running(), _ending_if_it_hangs(context, turns):
        yield turns


@contextlib.asynccontextmanager
async def _ending_if_it_hangs(context: Context, turns: Turns) -> AsyncIterator[None]:
    """End this process if a call of a model hangs during the body."""

    async def end() -> None:
        sentence = await turns.watch.hanging()
        with contextlib.suppress(TimeoutError, BusUnavailable):
            async with asyncio.timeout(_TELL_S):
                await tell(context.bus, "reward", "model hangs", sentence)
        end_process(sentence)

    async with beside(end()):
        yield


def _import_libraries() -> None:
    """Import what models need before their device is held, which others use meanwhile."""
    with importing():
        import penstock.services.reward.models.classifier
        import penstock.services.reward.models.frozen_policy  # noqa: F401


async def _unless_stopped(context: Context, work: Coroutine[Any, Any, None]) -> bool:
    """Return whether ``work`` was done before the service was stopped; raise its error."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(context.stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done() and not stopping.done()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _note_functions(context: Context) -> None:
    """Report scorers' functions whose source files are others than those of earlier versions."""
    digests = {}
    for function, name in reward_functions(context.settings).items():
        entries = () if ":" in name else tuple(metadata.entry_points(group=ENTRY_POINTS, name=name))
        digests[function] = await asyncio.to_thread(digest, entries[0].value if entries else name)
    await tell_changed(context.bus, "reward", await note_functions(context.bus, digests))


async def _rehearsed(context: Context, scoring: Scoring) -> bool:
    """Try the scorers; return False if stopped first. Raises SettingsError."""
    context.status.start.begin("waiting for rows")
    prompts = await rows(context.bus, context.stop)
    context.status.start.begin("trying the scorers")

    async def try_scorers() -> None:
        for doubt in await scoring.rehearse(context.settings, prompts):
            await tell(context.bus, "reward", "scorer doubtful", doubt)

    try:
        is_done = await _unless_stopped(context, try_scorers())
    except SettingsError as error:
        await tell(context.bus, "reward", "scorer refused", str(error))
        raise
    if is_done:
        context.status.state = "working"
        context.status.start.end()
    return is_done
