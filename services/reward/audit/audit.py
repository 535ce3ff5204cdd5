"""Re-score a sample of a run's rewarded completions with stricter scorers (docs/rewards.md, "Audit").

Programs run only in the executor. Reward models, judges and user functions are not re-run.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.services.reward.audit import suites as audit_suites
from penstock.services.reward.audit import texts
from penstock.services.reward.scorers.answer.scorer import AnswerMatcher
from penstock.services.reward.scorers.code.scorer import CodeTester
from penstock.services.reward.scorers.format.scorer import FormatChecker
from penstock.services.reward.scorers.scorer import Scorer
from penstock.shared.bus.messages import FinishReason, GroupId, Json, Prompt, RolloutGroup, Sample, Sampling
from penstock.shared.errors import PermanentError
from penstock.shared.reasoning import Reasoning
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.scorers import AnswerScorer, CodeScorer, FormatScorer

_ENOUGH = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedCompletion:
    text: str
    reward: float
    values: dict[str, float]
    tokens: int
    finish: FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class AuditedGroup:
    step: int
    group: int
    problem: str
    question: str
    answer: str | None
    extra: dict[str, Json]
    completions: tuple[RecordedCompletion, ...]

    @property
    def right(self) -> str:
        return texts.normal(self.answer) if self.answer else self.problem


@dataclasses.dataclass(frozen=True, slots=True)
class Disagreement:
    step: int
    group: int
    problem: str
    sample: int
    reward: float
    check: str
    detail: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class AuditReport:
    above: float
    groups: int
    completions: int
    checked: dict[str, int]
    unavailable: dict[str, int]
    """By check."""
    disagreements: tuple[Disagreement, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Variant:
    check: str
    of: str
    scorer: Scorer
    suites: str = ""
    """"shuffled" or "mutated" tests."""
    tests_field: str = ""
    boxes_only: bool = False
    reasoning: Reasoning | None = None
    """What of completions it does not read."""

    def text(self, completion: RecordedCompletion) -> str:
        return completion.text if self.reasoning is None else self.reasoning.answer(completion.text)


def choose(
    groups: Sequence[AuditedGroup], above: float | None, count: int, seed: int
) -> tuple[list[AuditedGroup], float]:
    """Without ``above`` it is half of the largest reward."""
    largest = max((each.reward for group in groups for each in group.completions), default=0.0)
    least = above if above is not None else max(largest / 2, _ENOUGH)
    rewarded = [group for group in groups if any(each.reward >= least for each in group.completions)]
    chosen = random.Random(seed).sample(rewarded, min(count, len(rewarded)))
    return sorted(chosen, key=lambda group: (group.step, group.group)), least


async def audit(
    groups: Sequence[AuditedGroup], settings: Settings, *, above: float | None, count: int, seed: int, executor: str
) -> AuditReport:
    """Re-score a sample of the rewarded completions of ``groups``. Raises SettingsError: a scorer cannot work here."""
    chosen, least = choose(groups, above, count, seed)
    checked: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    doubts = list(_signs(chosen, groups, settings, least, checked))
    reasoning = Reasoning(settings.reward.reasoning_markers)
    answers = {scorer.name for scorer in settings.reward.scorers if scorer.reads_answer}
    variants = [
        dataclasses.replace(variant, reasoning=reasoning if variant.of in answers else None)
        for variant in _variants(settings, executor)
    ]
    try:
        for variant in variants:
            await variant.scorer.start()
            for group in chosen:
                doubts += await _rescore(variant, group, least, seed, checked, lost)
    finally:
        for variant in variants:
            await variant.scorer.close()
    doubts.sort(key=lambda doubt: (doubt.check, doubt.step, doubt.group, doubt.sample))
    completions = sum(1 for group in chosen for _ in _rewarded(group, least))
    return AuditReport(least, len(chosen), completions, dict(checked), dict(lost), tuple(doubts))


def needs_executor(settings: Settings) -> bool:
    return any(isinstance(scorer, CodeScorer) for scorer in settings.reward.scorers)


def not_rescored(settings: Settings) -> list[str]:
    known = (AnswerScorer, FormatScorer, CodeScorer)
    return [scorer.name for scorer in settings.reward.scorers if not isinstance(scorer, known)]


def _rewarded(group: AuditedGroup, least: float) -> Iterator[tuple[int, RecordedCompletion]]:
    return ((place, each) for place, each in enumerate(group.completions) if each.reward >= least)


def _variants(settings: Settings, executor: str) -> list[_Variant]:
    variants: list[_Variant] = []
    for scorer in settings.reward.scorers:
        if isinstance(scorer, AnswerScorer):
            variants += _answer_variants(scorer, settings.data.answer_field)
        elif isinstance(scorer, FormatScorer):
            variants.append(_Variant("strict format", scorer.name, FormatChecker(_strict_format(scorer))))
        elif isinstance(scorer, CodeScorer):
            variants += _code_variants(scorer, executor)
    return variants


def _answer_variants(scorer: AnswerScorer, field: str) -> list[_Variant]:
    strict = scorer.strict()
    variants = [_Variant("strict answer", scorer.name, AnswerMatcher(strict, field))]
    if scorer.place in ("auto", "whole", "last_number", "hashes"):
        boxed = strict.model_copy(update={"extract": "boxed"})
        variants.append(_Variant("answer in the box", scorer.name, AnswerMatcher(boxed, field), boxes_only=True))
    return variants


def _strict_format(scorer: FormatScorer) -> FormatScorer:
    tags = tuple(tag.rstrip("?+*") for tag in scorer.tags)
    return scorer.model_copy(update={"tags": tags, "nothing_outside": bool(tags), "needs_stop": True})


def _code_variants(scorer: CodeScorer, executor: str) -> list[_Variant]:
    share = scorer.model_copy(update={"credit": "share"})
    return [
        _Variant("all tests, shuffled", scorer.name, CodeTester(scorer, executor), "shuffled", scorer.tests_field),
        _Variant("wrong expected values", scorer.name, CodeTester(share, executor), "mutated", scorer.tests_field),
    ]


async def _rescore(
    variant: _Variant, group: AuditedGroup, least: float, seed: int, checked: Counter[str], lost: Counter[str]
) -> list[Disagreement]:
    places = [
        place
        for place, each in _rewarded(group, least)
        if each.values.get(variant.of, 0.0) > 0 and not (variant.boxes_only and "\\boxed" not in variant.text(each))
    ]
    column = _tests(variant, group, seed)
    if not places or (variant.suites and not column):
        return []
    try:
        scores = await variant.scorer.score(_again(group, places, variant, column))
    except PermanentError:
        lost[variant.check] += len(places)
        return []
    checked[variant.check] += len(places)
    doubts = []
    for place, score in zip(places, scores, strict=True):
        if score.value is None:
            lost[variant.check] += 1
        elif _disagrees(variant, score.value, group.completions[place].values[variant.of]):
            detail = f"{score.status.value}: {score.detail}".rstrip(": ")
            doubts.append(_doubt(group, place, variant.check, f"{variant.of}: {score.value:g}, {detail}"))
    return doubts


def _disagrees(variant: _Variant, value: float, recorded: float) -> bool:
    return value > 0 if variant.suites == "mutated" else value < recorded - _ENOUGH


def _tests(variant: _Variant, group: AuditedGroup, seed: int) -> Json:
    if not variant.suites:
        return None
    column = audit_suites.read(group.extra.get(variant.tests_field))
    if variant.suites == "mutated":
        return audit_suites.mutated(column)
    return audit_suites.shuffled(column, random.Random(f"{seed}/{group.problem}"))


def _again(group: AuditedGroup, places: Sequence[int], variant: _Variant, column: Json) -> RolloutGroup:
    extra = {**group.extra, variant.tests_field: column} if variant.suites else group.extra
    sampling = Sampling(len(places), 1, 1.0)
    prompt = Prompt(
        GroupId(group.group), group.problem, sampling, text=group.question, answer=group.answer, extra=extra
    )
    samples = tuple(_sample(each, variant.text(each)) for each in map(group.completions.__getitem__, places))
    return RolloutGroup(prompt, np.zeros(1, np.int32), samples, "audit", 0.0, 0.0)


def _sample(completion: RecordedCompletion, text: str) -> Sample:
    tokens = np.zeros(completion.tokens, dtype=np.int32)
    return Sample(
        token_ids=tokens,
        behavior_logprobs=tokens.astype(np.float32),
        version_spans=np.array([[0, 0]], dtype=np.int32),
        finish_reason=completion.finish,
        text=text,
    )


def _signs(
    chosen: Sequence[AuditedGroup],
    groups: Sequence[AuditedGroup],
    settings: Settings,
    least: float,
    checked: Counter[str],
) -> Iterator[Disagreement]:
    rewarded = [(each, group) for group in groups for _, each in _rewarded(group, least)]
    lengths = [each.tokens for each, _ in rewarded]
    repeated = texts.repeated((each.text, group.right) for each, group in rewarded)
    kinds = {type(scorer) for scorer in settings.reward.scorers}
    seen: set[str] = set()
    for group in chosen:
        for place, each in _rewarded(group, least):
            signs = {"short": texts.short(each.tokens, lengths), "repetition": texts.repetitive(each.text)}
            if AnswerScorer in kinds:
                signs["several answers"] = texts.several_boxes(each.text)
                signs["copied from the question"] = texts.copied(each.text, group.question, group.answer or "")
            if not_rescored(settings):
                signs["addresses a judge"] = texts.injection(each.text)
            text = texts.normal(each.text)
            signs["same text for different problems"] = "" if text in seen else _repeats(repeated.get(text, 0))
            seen.add(text)
            checked.update(signs.keys())
            for check, detail in signs.items():
                if detail:
                    yield _doubt(group, place, check, detail)
        yield from _weak_suites(group, settings, least, checked)


def _repeats(answers: int) -> str:
    return f"rewarded for problems with {answers} different answers" if answers else ""


def _weak_suites(
    group: AuditedGroup, settings: Settings, least: float, checked: Counter[str]
) -> Iterator[Disagreement]:
    for scorer in settings.reward.scorers:
        if isinstance(scorer, CodeScorer) and scorer.tests_field in group.extra:
            checked["a constant passes"] += 1
            if audit_suites.constant(audit_suites.read(group.extra[scorer.tests_field])):
                place, _ = next(_rewarded(group, least))
                detail = f"{scorer.name}: all tests expect the same value"
                yield _doubt(group, place, "a constant passes", detail)


def _doubt(group: AuditedGroup, place: int, check: str, detail: str) -> Disagreement:
    each = group.completions[place]
    return Disagreement(group.step, group.group, group.problem, place, each.reward, check, detail, each.text)
