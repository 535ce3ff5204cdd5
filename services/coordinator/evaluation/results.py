"""Evaluation results by set, as stored. Only answered problems count."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from penstock.services.coordinator.evaluation.statistics import Estimate, estimate, pass_at
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion, RolloutGroup
from penstock.shared.bus.stores.policy.evaluations import Description, EvaluationRequest, Played, evaluated, results
from penstock.shared.bus.transcripts import tally

_CHUNK = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    version: PolicyVersion
    step: int
    set: str
    problems: int
    samples: int
    answered: int
    """Problems answered entirely by ``version``."""
    correct: int
    """Of answered × samples."""
    accuracy: float | None
    """Mean correct share over answered problems."""
    accuracy_low: float | None
    accuracy_high: float | None
    """95 % interval (``accuracy.estimate``)."""
    pass_at: dict[str, Estimate]
    """Probability that one of k is correct."""
    initial: bool
    final: bool
    started_at_s: float
    seconds: float
    note: str
    """Why answers are missing."""
    gate: str = ""
    """passed, fell, or empty: not applied."""
    gate_detail: str = ""
    """Reference and difference."""
    turns: float | None = None
    """Mean answers of the policy in an episode; None: no episodes."""
    calls: float | None = None
    """Mean calls of tools in an episode."""
    ended: dict[str, float] = dataclasses.field(default_factory=dict)
    """Share of the episodes that ended so."""


def summarize(
    description: Description,
    answers: Mapping[int, int],
    why: str,
    now_s: float,
    played: Mapping[int, Played] = MappingProxyType({}),
) -> list[Evaluation]:
    """Return results by set from ``answers`` (problem → correct completions) and the episodes ``played``."""
    evaluated, first = [], 0
    for asked in description.sets:
        problems = range(first, first + asked.problems)
        correct = [answers[problem] for problem in problems if problem in answers]
        result = _of_set(description, asked, correct, why, now_s)
        evaluated.append(_with_episodes(result, [played[problem] for problem in problems if problem in played]))
        first += asked.problems
    return evaluated


def _of_set(
    description: Description, asked: EvaluationRequest, correct: Sequence[int], why: str, now_s: float
) -> Evaluation:
    samples, missing = asked.samples, asked.problems - len(correct)
    accuracy = estimate([count / samples for count in correct], samples) if correct else None
    passes = {str(k): [pass_at(k, samples, count) for count in correct] for k in asked.pass_at if correct}
    note = f"{missing} of {asked.problems} problems are without an answer {why}".rstrip() if missing else ""
    return Evaluation(
        version=description.version,
        step=description.step,
        set=asked.set,
        problems=asked.problems,
        samples=samples,
        answered=len(correct),
        correct=sum(correct),
        accuracy=None if accuracy is None else accuracy.value,
        accuracy_low=None if accuracy is None else accuracy.low,
        accuracy_high=None if accuracy is None else accuracy.high,
        pass_at={k: estimate(values, samples) for k, values in passes.items()},
        initial=description.initial,
        final=description.final,
        started_at_s=description.started_at_s,
        seconds=now_s - description.started_at_s,
        note=note,
    )


def _with_episodes(result: Evaluation, played: Sequence[Played]) -> Evaluation:
    episodes, ended = sum(each.episodes for each in played), Counter[str]()
    if not episodes:
        return result
    for each in played:
        ended.update(each.ended)
    return dataclasses.replace(
        result,
        turns=sum(each.turns for each in played) / episodes,
        calls=sum(each.calls for each in played) / episodes,
        ended={reason: count / episodes for reason, count in sorted(ended.items())},
    )


def played_in(group: RolloutGroup) -> Played | None:
    """Return the sums of a problem's episodes; None: it has none."""
    samples = [sample for sample in group.samples if len(sample.segments)]
    if not samples:
        return None
    turns = sum(int(sample.segments[:, 2].astype(bool).sum()) for sample in samples)
    ended = Counter(sample.ended.value for sample in samples if sample.ended is not None)
    return Played(len(samples), turns, sum(tally(sample).calls for sample in samples), dict(ended))


def sentence(evaluation: Evaluation) -> str:
    if evaluation.accuracy is None:
        told = "failed"
    else:
        told = f"accuracy {evaluation.accuracy:.4f} ({evaluation.accuracy_low:.4f} to {evaluation.accuracy_high:.4f})"
        if evaluation.initial and evaluation.accuracy in (0, 1):  # rewards may be no 0 and 1 at all
            told += f"; {'every' if evaluation.accuracy else 'no'} answer counts as correct (evaluation.correct_above)"
    return f"version {evaluation.version} on {evaluation.set}: {told} {evaluation.note}".rstrip()


async def evaluations_of(bus: Bus, versions: Sequence[PolicyVersion]) -> dict[PolicyVersion, list[Evaluation]]:
    return {
        PolicyVersion(version): [evaluation_of(fields) for fields in json.loads(text)]
        for version, text in (await results(bus, versions)).items()
    }


class Evaluations:
    """All results of the run; each is read once, as a version is evaluated once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[PolicyVersion, list[Evaluation]] = {}

    async def read(self) -> list[Evaluation]:
        """Return every result, oldest version first."""
        versions = sorted(await evaluated(self._bus))
        new = [version for version in versions if version not in self._known]
        for start in range(0, len(new), _CHUNK):
            self._known |= await evaluations_of(self._bus, new[start : start + _CHUNK])
        self._known = {version: self._known[version] for version in versions if version in self._known}
        return [evaluation for of_version in self._known.values() for evaluation in of_version]


_EVALUATION = TypeAdapter(Evaluation)


def evaluation_of(fields: dict[str, Any]) -> Evaluation:
    """Raises ValueError: it is damaged."""
    return _EVALUATION.validate_python(fields)
