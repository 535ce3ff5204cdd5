"""Check a completion's form: the share of declared rules that hold (docs/rewards.md, "Format").

Tags are matched literally, without attributes or nesting. Pattern and schema are checked in a killable process
(:mod:`checks`), a group at a time; if that fails, each text alone.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias, cast

import regex

from penstock.services.reward.scorers.answer.extraction import tagged
from penstock.services.reward.scorers.format import checks
from penstock.services.reward.scorers.scorer import is_cut, unavailable, valued
from penstock.services.reward.scorers.turns import Turns
from penstock.services.reward.subprocess_pool.cache import Recent
from penstock.services.reward.subprocess_pool.pool import Crashed, NotReady, Overdue, Processes
from penstock.shared.bus.messages import RolloutGroup, Sample, Score, ScoreStatus
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.extras import install_command
from penstock.shared.settings.rewards import scorers

_SHORT = 4_000
"""Characters; longer texts are read in chunks of this size."""
CHECK_TIMEOUT_S = 0.5
"""CPU time of a pattern or json_schema check: status ``timeout``, value 0."""
_BATCH_TEXTS, _BATCH_CHARACTERS = 64, 64_000
"""Largest question with several texts, so that writing it does not hold the event loop."""
_MIN_SCRIPT_SHARE = 0.95
"""Tolerates names and symbols of another script, not a paragraph."""
_COMMAND = (sys.executable, "-m", "penstock.services.reward.scorers.format.checks")
_REMEMBERED = 4096
_LETTERS = regex.compile(r"\p{L}+")


_Check: TypeAlias = tuple[str, str]
"""(pattern or json, text)"""


@dataclasses.dataclass(frozen=True, slots=True)
class TextSpan:
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Tag:
    tag: str
    required: bool
    once: bool

    @classmethod
    def read(cls, written: str) -> "_Tag":
        count = written[-1] if written[-1] in "?+*" else ""
        return cls(written.removesuffix(count), required=count in ("", "+"), once=count in ("", "?"))


class FormatChecker:
    """Score the share of declared rules that a completion keeps. Raises SettingsError for missing or invalid rules."""

    def __init__(self, scorer: scorers.FormatScorer) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._turns = Turns()
        slow: dict[str, object] = {}
        if scorer.pattern:
            self._compiled("pattern", lambda: checks.compile_pattern(scorer.pattern))
            slow["pattern"] = scorer.pattern
        if scorer.json_schema:
            slow["json"] = scorer.json_schema
        scripts = "".join(rf"\p{{Script={script}}}" for script in scorer.scripts)
        self._script = (
            self._compiled("scripts", lambda: regex.compile(rf"[[{scripts}]&&\p{{L}}]+", regex.V1)) if scripts else None
        )
        self._checkers = Processes((*_COMMAND, json.dumps(slow)), 1, scorer.name, computes=True) if slow else None
        self._failed = Recent(_REMEMBERED)
        if not (scorer.tags or slow or scorer.scripts or any(scorer.tokens) or scorer.needs_stop):
            raise SettingsError(
                f"scorer {scorer.name!r} has no rule: give "
                "it tags, pattern, tokens, needs_stop or another in [[reward.scorers]]"
            )

    def _compiled(self, setting: str, compiled: Callable[[], "regex.Pattern[str]"]) -> "regex.Pattern[str]":
        try:
            return compiled()
        except regex.error as error:
            value = getattr(self._scorer, setting)
            expected = (
                "a regular expression as pattern" if setting == "pattern" else "names of Unicode scripts as scripts"
            )
            raise SettingsError(
                f"expected {expected} of scorer {self.name!r}, found {value!r} "
                f"({error}): change {setting} in [[reward.scorers]]"
            ) from error

    async def start(self) -> None:
        if self._checkers is None:
            return
        if self._scorer.json_schema and importlib.util.find_spec("jsonschema") is None:
            raise SettingsError(
                f"scorer {self.name!r} with json_schema needs the package jsonschema: "
                f"{install_command('reward')}, or remove json_schema in [[reward.scorers]]"
            )
        try:
            await self._checkers.warm()
        except NotReady as error:
            raise SettingsError(
                f"json_schema of scorer {self.name!r} is not a JSON schema: {error}: change json_schema in "
                f"[[reward.scorers]]"
            ) from error

    async def close(self) -> None:
        if self._checkers is not None:
            await self._checkers.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        checks = [self._checks(sample.text) for sample in group.samples]
        problems = await self._problems(dict.fromkeys(itertools.chain(*checks)))
        return [await self._check(sample, own, problems) for sample, own in zip(group.samples, checks, strict=True)]

    def _checks(self, text: str) -> list[_Check]:
        content = self._json_content(text)
        return [
            *([("pattern", text)] if self._scorer.pattern else []),
            *([("json", content)] if content is not None else []),
        ]

    def _json_content(self, text: str) -> str | None:
        if not self._scorer.json_schema:
            return None
        return tagged(text, self._scorer.json_tag) if self._scorer.json_tag else text

    async def _problems(self, checks: Iterable[_Check]) -> dict[_Check, str]:
        problems: dict[_Check, str] = {}
        for batch in _batches([check for check in checks if self._failed.get(*check) is None]):
            with contextlib.suppress(Overdue, Crashed, TemporaryError):
                problems |= await self._ask(batch)
        return problems

    async def _ask(self, checks: list[_Check]) -> dict[_Check, str]:
        """Return how texts break rules. Raises what :meth:`Processes.ask` raises."""
        assert self._checkers is not None
        answer = await self._checkers.ask({"texts": [list(check) for check in checks]}, CHECK_TIMEOUT_S)
        return dict(zip(checks, map(str, cast(list[object], answer["broken"])), strict=True))

    async def _check(self, sample: Sample, checks: list[_Check], problems: dict[_Check, str]) -> Score:
        for check in checks:
            if check not in problems:
                failed = await self._ask_alone(check, problems)
                if failed is not None:
                    return failed
        rules = partial(self._broken, sample, problems, await self._script_problem(sample.text))
        if len(sample.text) > _SHORT:
            return self._valued(await asyncio.to_thread(rules))
        return self._valued(await self._turns.take(rules))

    async def _ask_alone(self, check: _Check, problems: dict[_Check, str]) -> Score | None:
        """Ask about one text; return its score if that fails."""
        failed = self._failed.get(*check)
        if failed is not None:
            return failed
        try:
            problems |= await self._ask([check])
            return None
        except Overdue:
            setting = "json_schema" if check[0] == "json" else check[0]
            failed = valued(self.name, ScoreStatus.TIMEOUT, 0.0, f"{setting} took longer than {CHECK_TIMEOUT_S:g} s")
        except Crashed as error:
            failed = valued(self.name, ScoreStatus.CRASHED, 0.0, str(error))
        except TemporaryError as error:
            return unavailable(self.name, str(error))
        self._failed.put(failed, *check)
        return failed

    def _valued(self, problems: list[str]) -> Score:
        broken = [problem for problem in problems if problem]
        if not broken:
            return valued(self.name, ScoreStatus.OK, 1.0)
        return valued(self.name, ScoreStatus.WRONG_FORMAT, 1 - len(broken) / len(problems), broken[0])

    async def _script_problem(self, text: str) -> str:
        script, rules = self._script, self._scorer
        if script is None:
            return ""
        letters = counted = 0
        for start in range(0, len(text), _SHORT):
            part = text[start : start + _SHORT]
            letters += await self._turns.take(partial(_characters, _LETTERS, part))
            counted += await self._turns.take(partial(_characters, script, part))
        share = counted / letters if letters else 1.0
        if share >= _MIN_SCRIPT_SHARE:
            return ""
        names = ", ".join(rules.scripts)
        return f"expected a share of {_MIN_SCRIPT_SHARE:g} of letters in {names}, found {share:.3g}"

    def _broken(self, sample: Sample, problems: dict[_Check, str], script_problem: str) -> list[str]:
        return list(self._rules(sample, problems, script_problem))

    def _rules(self, sample: Sample, problems: dict[_Check, str], script_problem: str) -> Iterator[str]:
        text, rules = sample.text, self._scorer
        yield from _tag_rules(rules, text)
        if rules.pattern:
            yield problems["pattern", text]
        if any(rules.tokens):
            yield _broken_length(len(sample.token_ids), *rules.tokens)
        if rules.scripts:
            yield script_problem
        if rules.json_schema:
            yield self._json_problem(text, problems)
        if rules.needs_stop:
            yield "the completion was cut at its length limit" if is_cut(sample) else ""

    def _json_problem(self, text: str, problems: dict[_Check, str]) -> str:
        content = self._json_content(text)
        tag = self._scorer.json_tag
        return f"expected JSON in <{tag}>…</{tag}>, found none" if content is None else problems["json", content]


def _batches(checks: Iterable[_Check]) -> Iterator[list[_Check]]:
    batch: list[_Check] = []
    characters = 0
    for check in checks:
        if len(batch) == _BATCH_TEXTS or (batch and characters + len(check[1]) > _BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append(check)
        characters += len(check[1])
    if batch:
        yield batch


def _tag_rules(rules: scorers.FormatScorer, text: str) -> Iterator[str]:
    declared = [_Tag.read(written) for written in rules.tags]
    rule_places = [(rule, spans(text, rule.tag)) for rule in declared]
    for rule, places in rule_places:
        yield _broken_tag(rule, places, text)
    if len(rules.tags) > 1:
        missing = [rule.tag for rule, places in rule_places if rule.required and not places]
        firsts = [(rule.tag, places[0]) for rule, places in rule_places if places]
        yield f"expected <{missing[0]}> in its place" if missing else _broken_order(firsts)
    if rules.nothing_outside and rules.tags:
        yield _broken_outside(text, [span for _, places in rule_places for span in places])


def spans(text: str, tag: str) -> list[TextSpan]:
    """Return every ``<tag>…</tag>``, each opening paired with the first closing after it."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    text_spans: list[TextSpan] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        position = end + len(closing)
        text_spans.append(TextSpan(start, position))
    return text_spans


def _broken_tag(rule: _Tag, places: list[TextSpan], text: str) -> str:
    openings, closings = text.count(f"<{rule.tag}>"), text.count(f"</{rule.tag}>")
    if openings != closings or len(places) < min(openings, 1):
        return f"expected <{rule.tag}> closed by </{rule.tag}>, found {openings} and {closings}"
    if rule.required and not places:
        return f"expected <{rule.tag}>…</{rule.tag}>, found none"
    if rule.once and openings > 1:
        return f"expected <{rule.tag}> once, found it {openings} times"
    return ""


def _broken_order(firsts: list[tuple[str, TextSpan]]) -> str:
    for (before, earlier), (after, later) in itertools.pairwise(firsts):
        if later.start < earlier.end:
            return f"expected <{after}> after </{before}>"
    return ""


def _broken_outside(text: str, inside: list[TextSpan]) -> str:
    position = 0
    for span in sorted(inside, key=lambda span: span.start):
        if text[position : max(position, span.start)].strip():
            return "expected nothing outside the tags"
        position = max(position, span.end)
    return "expected nothing outside the tags" if text[position:].strip() else ""


def _broken_length(length: int, least: int, most: int) -> str:
    if length < least:
        return f"expected at least {least} tokens, found {length}"
    if most and length > most:
        return f"expected at most {most} tokens, found {length}"
    return ""


def _characters(pattern: "regex.Pattern[str]", text: str) -> int:
    return sum(map(len, pattern.findall(text)))
