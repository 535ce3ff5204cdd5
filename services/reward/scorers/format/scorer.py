"""Check a completion's form by declared rules. Its value is the share of rules that hold, each with its weight.

::

    tags      each tag is there, once, and closed       one rule for each tag
    order     … and they come in the declared order     where there are several
    outside   nothing but white space outside them      where nothing_outside is set
    pattern   a regular expression matches all of it
    length    in characters
    tokens    length in the policy's tokens
    scripts   the share of its letters in some Unicode scripts
    json      JSON that keeps a schema
    stop      it ended by itself

Rules are counted and named in this order; a rule that is not declared is not counted. ``<think>…</think>`` is found
literally; attributes and nesting are not read.

The pattern runs under the ``regex`` package, which gives up at a deadline, since a pattern can take for ever on text
that a model writes: first for a moment in this thread, then longer in another while this one goes on. A JSON schema can
too, and is checked in a killable process (:mod:`json_check`).
"""

import asyncio
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import regex

from services.reward.scorers.answer.extraction import tagged
from services.reward.scorers.scorer import is_cut, unavailable, valued
from services.reward.scorers.turns import Turns
from services.reward.subprocess_pool.pool import Crashed, NotReady, Overdue, Processes
from shared.bus.messages import RolloutGroup, Sample, Score, ScoreStatus
from shared.errors import SettingsError, TemporaryError
from shared.settings.rewards import scorers
from shared.settings.rewards.scorers import FormatRule

_AT_ONCE_S = 0.002
"""How long a pattern may hold the event loop."""
_SHORT = 4_000
"""A text up to this length, in characters, is checked in the event loop."""
PATTERN_TIMEOUT_S = 1.0
"""How long a pattern may take in all: status ``timeout``, value 0."""
JSON_TIMEOUT_S = 2.0
"""How long a check against json_schema may take: its process is killed then, status ``timeout``, value 0."""
_MIN_SCRIPT_SHARE = 0.95
"""Names and symbols of another script are tolerated, a paragraph is not."""
_JSON_COMMAND = (sys.executable, "-m", "services.reward.scorers.format.json_check")
_LETTER = regex.compile(r"\p{L}")


@dataclasses.dataclass(frozen=True, slots=True)
class TextSpan:
    """One pair of tags: where its opening tag begins and its closing tag ends, in characters."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Tag:
    """One entry of `tags`."""

    tag: str
    required: bool
    once: bool

    @classmethod
    def read(cls, written: str) -> "_Tag":
        """Read `think`, `think?`, `think+` or `think*`."""
        count = written[-1] if written[-1] in "?+*" else ""
        return cls(written.removesuffix(count), required=count in ("", "+"), once=count in ("", "?"))


class FormatChecker:
    """Score the share of declared rules that a completion keeps.

    Raises:
        SettingsError: no rule is declared, or one means nothing.
    """

    def __init__(self, scorer: scorers.FormatScorer) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._turns = Turns()
        self._pattern = self._compiled("pattern", scorer.pattern, regex.DOTALL) if scorer.pattern else None
        scripts = "".join(rf"\p{{Script={script}}}" for script in scorer.scripts)
        self._script = self._compiled("scripts", rf"[[{scripts}]&&\p{{L}}]", regex.V1) if scripts else None
        command = (*_JSON_COMMAND, json.dumps(scorer.json_schema))
        self._checkers = Processes(command, 1, scorer.name) if scorer.json_schema else None
        rules = self._declared()
        if not rules:
            raise SettingsError(
                f"expected at least one rule for scorer {scorer.name!r}, found none: "
                "give it tags, pattern, characters, needs_stop or another in [[reward.scorers]]"
            )
        if unused := set(scorer.weights) - rules:
            raise SettingsError(
                f"expected weights of rules that scorer {scorer.name!r} has ({', '.join(sorted(rules))}), found "
                f"{min(unused)!r}: change weights in [[reward.scorers]]"
            )

    def _compiled(self, setting: str, pattern: str, flags: int) -> "regex.Pattern[str]":
        try:
            return regex.compile(pattern, flags)
        except regex.error as error:
            found = getattr(self._scorer, setting)
            wanted = (
                "a regular expression as pattern" if setting == "pattern" else "names of Unicode scripts as scripts"
            )
            raise SettingsError(
                f"expected {wanted} of scorer {self.name!r}, found {found!r} "
                f"({error}): change {setting} in [[reward.scorers]]"
            ) from error

    def _declared(self) -> set[FormatRule]:
        rules = self._scorer
        declared: dict[FormatRule, bool] = {
            "tags": bool(rules.tags),
            "order": len(rules.tags) > 1,
            "outside": rules.nothing_outside and bool(rules.tags),
            "pattern": bool(rules.pattern),
            "length": any(rules.characters),
            "tokens": any(rules.tokens),
            "scripts": bool(rules.scripts),
            "json": bool(rules.json_schema),
            "stop": rules.needs_stop,
        }
        return {rule for rule, is_declared in declared.items() if is_declared}

    async def start(self) -> None:
        """Start the process that checks JSON, where there is a schema.

        Raises:
            SettingsError: the schema is none, or jsonschema is not installed.
        """
        if self._checkers is None:
            return
        if importlib.util.find_spec("jsonschema") is None:
            raise SettingsError(
                f"expected the package jsonschema for scorer {self.name!r} with json_schema, found none: "
                "pip install 'penstock[reward]', or remove json_schema in [[reward.scorers]]"
            )
        try:
            await self._checkers.warm()
        except NotReady as error:
            raise SettingsError(
                f"expected a JSON schema for scorer {self.name!r}, found {error}: change json_schema in [[reward.scorers]]"
            ) from error

    async def close(self) -> None:
        """Kill the process that checks JSON."""
        if self._checkers is not None:
            await self._checkers.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Check each sample; long ones in a thread, beside the event loop."""
        return [await self._check(sample) for sample in group.samples]

    async def _check(self, sample: Sample) -> Score:
        try:
            matches = await self._matches(sample.text)
        except TimeoutError:
            return valued(self.name, ScoreStatus.TIMEOUT, 0.0, f"pattern took longer than {PATTERN_TIMEOUT_S:g} s")
        try:
            json_problem = await self._json_problem(sample.text)
        except Overdue as error:
            return valued(self.name, ScoreStatus.TIMEOUT, 0.0, f"json_schema: {error}")
        except Crashed as error:
            return valued(self.name, ScoreStatus.CRASHED, 0.0, f"json_schema: {error}")
        except TemporaryError as error:
            return unavailable(self.name, str(error))
        rules = partial(self._broken, sample, matches, json_problem)
        if len(sample.text) > _SHORT:
            return self._valued(await asyncio.to_thread(rules))
        return self._valued(await self._turns.take(rules))

    def _valued(self, rules: list[tuple[FormatRule, str]]) -> Score:
        weights = [self._scorer.weights.get(rule, 1.0) for rule, _ in rules]
        broken = [problem for _, problem in rules if problem]
        if not broken:
            return valued(self.name, ScoreStatus.OK, 1.0)
        lost = sum(weight for weight, (_, problem) in zip(weights, rules, strict=True) if problem)
        return valued(self.name, ScoreStatus.WRONG_FORMAT, max(0.0, 1 - lost / sum(weights)), broken[0])

    async def _json_problem(self, text: str) -> str:
        if self._checkers is None:
            return ""
        tag = self._scorer.json_tag
        content = tagged(text, tag) if tag else text
        if content is None:
            return f"expected JSON in <{tag}>…</{tag}>, found none"
        answer = await self._checkers.ask({"text": content}, JSON_TIMEOUT_S)
        return str(answer["broken"])

    async def _matches(self, text: str) -> bool:
        pattern = self._pattern
        if pattern is None:
            return True
        try:
            if len(text) <= _SHORT:
                return await self._turns.take(lambda: pattern.fullmatch(text, timeout=_AT_ONCE_S) is not None)
            raise TimeoutError
        except TimeoutError:
            return await asyncio.to_thread(
                lambda: pattern.fullmatch(text, timeout=PATTERN_TIMEOUT_S, concurrent=True) is not None
            )

    def _broken(self, sample: Sample, matches: bool, json_problem: str) -> list[tuple[FormatRule, str]]:
        return list(self._rules(sample, matches, json_problem))

    def _rules(self, sample: Sample, matches: bool, json_problem: str) -> Iterator[tuple[FormatRule, str]]:
        """Yield each declared rule's name and how it is broken, or nothing ("")."""
        text, rules = sample.text, self._scorer
        yield from _tag_rules(rules, text)
        if self._pattern is not None:
            yield "pattern", "" if matches else "expected text that matches the pattern"
        if any(rules.characters):
            yield "length", _broken_length(len(text), *rules.characters, "characters")
        if any(rules.tokens):
            yield "tokens", _broken_length(len(sample.token_ids), *rules.tokens, "tokens")
        if self._script is not None:
            yield "scripts", _broken_script(text, self._script, rules)
        if self._checkers is not None:
            yield "json", json_problem
        if rules.needs_stop:
            yield "stop", "expected an end, found its length limit" if is_cut(sample) else ""


def _tag_rules(rules: scorers.FormatScorer, text: str) -> Iterator[tuple[FormatRule, str]]:
    declared = [_Tag.read(written) for written in rules.tags]
    found = [(rule, spans(text, rule.tag)) for rule in declared]
    for rule, places in found:
        yield "tags", _broken_tag(rule, places, text)
    if len(rules.tags) > 1:
        missing = [rule.tag for rule, places in found if rule.required and not places]
        firsts = [(rule.tag, places[0]) for rule, places in found if places]
        yield "order", f"expected <{missing[0]}> in its place" if missing else _broken_order(firsts)
    if rules.nothing_outside and rules.tags:
        yield "outside", _broken_outside(text, [span for _, places in found for span in places])


def spans(text: str, tag: str) -> list[TextSpan]:
    """Return every ``<tag>…</tag>`` in ``text``, first opening with first closing after it."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    found: list[TextSpan] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        position = end + len(closing)
        found.append(TextSpan(start, position))
    return found


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
    for (before, earlier), (after, later) in pairwise(firsts):
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


def _broken_length(found: int, least: int, most: int, unit: str) -> str:
    if found < least:
        return f"expected at least {least} {unit}, found {found}"
    if most and found > most:
        return f"expected at most {most} {unit}, found {found}"
    return ""


def _broken_script(text: str, script: "regex.Pattern[str]", rules: scorers.FormatScorer) -> str:
    letters = len(_LETTER.findall(text, concurrent=True))
    share = len(script.findall(text, concurrent=True)) / letters if letters else 1.0
    if share >= _MIN_SCRIPT_SHARE:
        return ""
    return f"expected a share of {_MIN_SCRIPT_SHARE:g} of letters in {', '.join(rules.scripts)}, found {share:.3g}"
