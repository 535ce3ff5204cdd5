"""Dry run of every scorer on a few rows of the data, before the first group is scored.

::

    rows (from the coordinator) × {the row's answer, a trivial completion} ──▶ each scorer, one sample at a time
                                                    ├── fails on all, through a fault of its own ──▶ the start is refused
                                                    └── fails on some, or cannot work yet        ──▶ noted as a failure

A judge is left out, as its requests may cost money, and so are the reference and the expression. Nothing is kept of the
values; the prompts count as an evaluation's, so running statistics stay as they are.
"""

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence

import numpy as np

from services.reward.failures import Failures, part_of
from services.reward.scorers.scorer import Scorer
from shared.bus.bus import Bus
from shared.bus.messages import FinishReason, Prompt, Purpose, RolloutGroup, Sample, ScoreStatus
from shared.bus.stores import rehearsal
from shared.bus.streams import EVAL_ROLLOUTS, ROLLOUTS
from shared.errors import PermanentError, SettingsError, TemporaryError
from shared.settings.rewards.scorers import JudgeScorer, PythonScorer
from shared.settings.rewards.scorers import Scorer as ScorerSettings

log = logging.getLogger(__name__)

TRIVIAL = "0"
"""The completion that is tried of every row."""
_ROWS_WITHIN_S = 30.0
"""A replica that finds no rows on the bus for this long begins without a dry run: no coordinator is there."""
_LOOK_EVERY_S = 0.1
_AS_ZERO = (ScoreStatus.CRASHED, ScoreStatus.TIMEOUT)
"""What a user's function that raises or is late is called where ``on_error`` makes that a 0."""
_ENOUGH_S = 4.0
"""Once it has taken this long, a scorer that has failed on everything tried so far is not tried further."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What one scorer said of one completion of one row."""

    problem: str
    """``file:line`` of the row."""
    failure: str = ""
    """Why it gave no score; empty: it gave one."""
    own: bool = False
    """Whether the failure is the scorer's or the row's, and will be there again."""


async def rows(bus: Bus, stop: asyncio.Event, within_s: float = _ROWS_WITHIN_S) -> list[Prompt]:
    """Return the rows to try, once the coordinator wrote them; none if there is work already, or none comes in time."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s and not stop.is_set():
        if found := await rehearsal.offered(bus):
            return found
        if await bus.length(ROLLOUTS) or await bus.length(EVAL_ROLLOUTS):
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    log.warning("scorers not tried before training", extra={"reason": "no rows on the bus"})
    return []


async def rehearse(
    scorers: Sequence[tuple[ScorerSettings, Scorer]], prompts: Sequence[Prompt], failures: Failures
) -> None:
    """Try every scorer but judges, and note in ``failures`` what each failed on.

    Raises:
        SettingsError: one failed on everything that was tried, through a fault of its own.
    """
    asked = [(of, scorer) for of, scorer in scorers if not isinstance(of, JudgeScorer)]
    trials = await asyncio.gather(*(_try(of, scorer, prompts, failures) for of, scorer in asked))
    for (_, scorer), tried in zip(asked, trials, strict=True):
        failed = [trial for trial in tried if trial.failure]
        for trial in failed:
            await failures.failed(part_of(scorer.name), trial.problem, trial.failure)
        if failed and len(failed) == len(tried) and all(trial.own for trial in failed):
            raise SettingsError(_refusal(scorer.name, failed))
        if len(failed) < len(tried):
            failures.succeeded(part_of(scorer.name))


def _refusal(name: str, failed: Sequence[Trial]) -> str:
    problems = list(dict.fromkeys(trial.problem for trial in failed))
    return (
        f"scorer {name!r} failed on every row of its dry run before training ({len(failed)} completions of "
        f"{', '.join(problems)}): {failed[0].failure}. Correct the scorer or the data, or change its table in "
        "[[reward.scorers]]"
    )


async def _try(of: ScorerSettings, scorer: Scorer, prompts: Sequence[Prompt], failures: Failures) -> list[Trial]:
    """Try one scorer on the rows that it applies to, their answers first."""
    applying = [prompt for prompt in prompts if not prompt.scorers or scorer.name in prompt.scorers]
    answers = [(prompt, prompt.answer) for prompt in applying if prompt.answer]
    cases = [*itertools.islice(answers, 3), *((prompt, TRIVIAL) for prompt in applying[:3])]
    started_s = time.monotonic()
    tasks = [asyncio.create_task(_ask(of, scorer, prompt, text, failures)) for prompt, text in cases]
    done: list[Trial] = []
    try:
        for next_one in asyncio.as_completed(tasks):
            done.append(await next_one)
            if time.monotonic() - started_s > _ENOUGH_S and all(trial.failure for trial in done):
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done


async def _ask(of: ScorerSettings, scorer: Scorer, prompt: Prompt, text: str, failures: Failures) -> Trial:
    try:
        with failures.calling(part_of(scorer.name), prompt.problem):
            (score,) = await scorer.score(_group(prompt, text))
    except PermanentError as error:
        return Trial(prompt.problem, str(error), own=True)
    except TemporaryError as error:
        return Trial(prompt.problem, str(error))
    lost = score.status is ScoreStatus.UNAVAILABLE
    if isinstance(of, PythonScorer) and (lost or (of.on_error == "zero" and score.status in _AS_ZERO)):
        return Trial(prompt.problem, score.detail, own=True)
    return Trial(prompt.problem, score.detail if lost else "")


def _group(prompt: Prompt, text: str) -> RolloutGroup:
    """Return a group of one completion; its tokens are the text's bytes, as no tokenizer is here."""
    tokens = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32)
    sample = Sample(
        token_ids=tokens,
        behavior_logprobs=np.zeros(len(tokens), dtype=np.float32),
        version_spans=np.array([[0, 0]], dtype=np.int32),
        finish_reason=FinishReason.STOP,
        text=text,
    )
    now_s = time.time()
    asked = dataclasses.replace(prompt, purpose=Purpose.EVALUATE)
    return RolloutGroup(asked, np.zeros(1, dtype=np.int32), (sample,), "rehearsal", now_s, now_s)
