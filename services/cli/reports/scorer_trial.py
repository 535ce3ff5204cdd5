"""Try a run's scorers on a few rows, as the reward service does before training, without a bus or a policy."""

import asyncio
from collections.abc import Sequence

from penstock.services.cli.reports.audit_rewards import fresh_executor
from penstock.services.coordinator.admission.dataset import Problem, rows_to_try
from penstock.services.reward.failures import Failures
from penstock.services.reward.rehearsal import Trial, doubt, rehearse
from penstock.services.reward.service import make_scorer
from penstock.services.up.display import console
from penstock.shared.bus.messages import Prompt
from penstock.shared.expression import Expression
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.models import ModelScorer
from penstock.shared.settings.rewards.scorers import JudgeScorer
from penstock.shared.text.terminal import escaped_line

_LONGEST_TEXT = 24


def try_scorers(settings: Settings, problems: Sequence[Problem]) -> bool:
    """Print each scorer's values; return whether none failed. Judges and reward models are not asked.

    Raises SettingsError: a scorer cannot start, or failed on every row.
    """
    names = [scorer.name for scorer in settings.reward.scorers]
    Expression(settings.reward.expression, names)
    prompts = rows_to_try(problems, names)
    with fresh_executor(settings) as ready:
        by_scorer = asyncio.run(_tried(ready, prompts))
    console.say("")
    for name in names:
        if name not in by_scorer:
            console.say(f"scorer {name}: not tried (a model, judge or environment)")
            continue
        for line in _lines(name, by_scorer[name]):
            console.say(line)
    for of in settings.reward.scorers:
        if said := doubt(of, by_scorer.get(of.name, ()), prompts):
            console.say(f"warning: {said}")
    return not any(trial.failure for trials in by_scorer.values() for trial in trials)


async def _tried(settings: Settings, prompts: Sequence[Prompt]) -> dict[str, list[Trial]]:
    chosen = [of for of in settings.reward.scorers if not isinstance(of, JudgeScorer | ModelScorer)]
    scorers = [make_scorer(of, settings) for of in chosen]
    try:
        for scorer in scorers:
            await scorer.start()
        return await rehearse(list(zip(chosen, scorers, strict=True)), prompts, Failures(Status()))
    finally:
        for scorer in scorers:
            await scorer.close()


def _lines(name: str, trials: Sequence[Trial]) -> list[str]:
    values = [f"{_shown(trial)} {trial.value:.3g}" for trial in trials if trial.value is not None]
    failures = [
        f"scorer {name}: failed on {_shown(trial)} of {trial.problem}: {trial.failure}"
        for trial in trials
        if trial.failure
    ]
    tried = ", ".join(values) or "no row to try it on"
    return [escaped_line(line) for line in ([f"scorer {name}: {tried}"] if values or not failures else []) + failures]


def _shown(trial: Trial) -> str:
    """Return a completion that was scored: a row's answer, or a trivial one."""
    return repr(trial.text if len(trial.text) <= _LONGEST_TEXT else f"{trial.text[:_LONGEST_TEXT]}…")
