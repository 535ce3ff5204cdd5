"""Dry run of every scorer on a few rows before the first group (docs/rewards.md, "Rehearsal").

Skips judges, the reference and the expression. Prompts count as evaluation, so running statistics do not change.
"""

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence

import numpy as np

from penstock.services.reward.failures import DRY_RUN_SILENT_S, Failures, part_of
from penstock.services.reward.scorers.scorer import Scorer
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import FinishReason, Prompt, Purpose, RolloutGroup, Sample, ScoreStatus
from penstock.shared.bus.stores.experience import rehearsal
from penstock.shared.bus.streams import EVAL_ROLLOUTS, ROLLOUTS
from penstock.shared.errors import PermanentError, SettingsError, TemporaryError
from penstock.shared.settings.rewards.scorers import (
    AnswerScorer,
    EnvironmentScorer,
    JudgeScorer,
    PythonScorer,
    TrlScorer,
)
from penstock.shared.settings.rewards.scorers import Scorer as ScorerSettings

log = logging.getLogger(__name__)

TRIVIAL = "0"
_ROWS_WITHIN_S = 30.0
"""Without rows after this time there is no dry run."""
_LOOK_EVERY_S = 0.1
_AS_ZERO = (ScoreStatus.CRASHED, ScoreStatus.TIMEOUT)
"""Statuses of a failing user function with ``on_error`` 0."""
_ENOUGH_S = 4.0
"""After this time, a scorer that failed on everything is given up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    problem: str
    text: str
    value: float | None = None
    failure: str = ""
    own: bool = False
    """The failure is permanent: the scorer's or the row's."""


async def rows(bus: Bus, stop: asyncio.Event, within_s: float = _ROWS_WITHIN_S) -> list[Prompt]:
    """Empty if there is work already, or on timeout."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s and not stop.is_set():
        if prompts := await rehearsal.offered(bus):
            return prompts
        if await bus.length(ROLLOUTS) or await bus.length(EVAL_ROLLOUTS):
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    log.warning("scorers not tried before training", extra={"reason": "no rows on the bus"})
    return []


async def rehearse(
    scorers: Sequence[tuple[ScorerSettings, Scorer]], prompts: Sequence[Prompt], failures: Failures
) -> dict[str, list[Trial]]:
    """Try every scorer except judges and environments' rewards, record their failures and return the trials by scorer. Raises SettingsError: a
    scorer failed on everything, by its own fault.
    """
    asked = [(of, scorer) for of, scorer in scorers if not isinstance(of, (JudgeScorer, EnvironmentScorer))]
    trials = await asyncio.gather(*(_try(of, scorer, prompts, failures) for of, scorer in asked))
    for (_, scorer), tried in zip(asked, trials, strict=True):
        failed = [trial for trial in tried if trial.failure]
        for trial in failed:
            await failures.failed(part_of(scorer.name), trial.problem, trial.failure)
        if failed and len(failed) == len(tried) and all(trial.own for trial in failed):
            raise SettingsError(_refusal(scorer.name, failed))
        if len(failed) < len(tried):
            failures.succeeded(part_of(scorer.name))
    return {scorer.name: tried for (_, scorer), tried in zip(asked, trials, strict=True)}


def doubt(of: ScorerSettings, trials: Sequence[Trial], prompts: Sequence[Prompt]) -> str:
    """Return what to say of a scorer to which the rows' answers are worth no more than a trivial one; "": they are."""
    answers = [trial.value for trial in trials if trial.text != TRIVIAL and trial.value is not None]
    trivial = [trial.value for trial in trials if trial.text == TRIVIAL and trial.value is not None]
    if not answers or not trivial or max(answers) > max(trivial):
        return ""
    told = f"scorer {of.name!r} gives the rows' own answers no more than {TRIVIAL!r}: "
    if isinstance(of, AnswerScorer):
        marks = {"boxed": r"\boxed", "hashes": "####", "tag": f"<{of.tag}>"}
        if (mark := marks.get(of.place, "")) and all(mark in _asked(each) for each in _applying(of.name, prompts)):
            return ""
        asks = (
            f"completions need {mark}, which the prompts do not ask for: ask by data.user or data.system, or "
            if mark
            else ""
        )
        return f"{told}{asks}change extract or mode in its table of [[reward.scorers]]"
    compares = isinstance(of, (PythonScorer, TrlScorer))
    return f"{told}if it compares with them, change the form that it reads, or data.answer_field" if compares else ""


def _applying(name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if not prompt.scorers or name in prompt.scorers]


def _asked(prompt: Prompt) -> str:
    return "\n".join([prompt.text or "", *(turn.content for turn in prompt.messages or ())])


def _refusal(name: str, failed: Sequence[Trial]) -> str:
    problems = list(dict.fromkeys(trial.problem for trial in failed))
    return (
        f"scorer {name!r} failed on every row of its dry run before training ({len(failed)} completions of "
        f"{', '.join(problems)}): {failed[0].failure}. Correct the scorer or the data, or change its table in "
        "[[reward.scorers]]"
    )


async def _try(of: ScorerSettings, scorer: Scorer, prompts: Sequence[Prompt], failures: Failures) -> list[Trial]:
    applying = _applying(scorer.name, prompts)
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
        with failures.calling(part_of(scorer.name), prompt.problem, DRY_RUN_SILENT_S):
            score, *_ = await scorer.score(_group(prompt, text, 2 if isinstance(of, TrlScorer) else 1))
    except PermanentError as error:
        return Trial(prompt.problem, text, failure=str(error), own=True)
    except TemporaryError as error:
        return Trial(prompt.problem, text, failure=str(error))
    lost = score.status is ScoreStatus.UNAVAILABLE
    zeroed = isinstance(of, PythonScorer) and of.on_error == "zero" and score.status in _AS_ZERO
    if zeroed or (lost and isinstance(of, (PythonScorer, TrlScorer))):
        return Trial(prompt.problem, text, failure=score.detail, own=True)
    return Trial(prompt.problem, text, score.value, score.detail if lost else "")


def _group(prompt: Prompt, text: str, samples: int) -> RolloutGroup:
    """Return a group of equal samples: functions of a whole group get two, so that a list of another length shows."""
    tokens = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32)
    sample = Sample(
        token_ids=tokens,
        behavior_logprobs=np.zeros(len(tokens), dtype=np.float32),
        version_spans=np.array([[0, 0]], dtype=np.int32),
        finish_reason=FinishReason.STOP,
        text=text,
    )
    now_s = time.time()
    sampling = dataclasses.replace(prompt.sampling, samples=samples)
    asked = dataclasses.replace(prompt, purpose=Purpose.EVALUATE, sampling=sampling)
    return RolloutGroup(asked, np.zeros(1, dtype=np.int32), (sample,) * samples, "rehearsal", now_s, now_s)
