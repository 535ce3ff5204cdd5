"""Check a completion's form by declared rules. Its value is the share of rules that hold.

The rules, in the order in which they are counted and named: each tag's own (it is there, once, and closed), the tags'
order, nothing outside them, the pattern, the length, the end. A tag's rule is one rule, and a rule that is not declared
is not counted. ``<think>…</think>`` is found literally; attributes and nesting are not read.

The pattern runs under the ``regex`` package, which gives up at a deadline, since a pattern can take for ever on text
that a model writes: first for a moment in this thread, then longer in another while this one goes on.
"""

import asyncio
import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import regex

from services.reward.scorer import is_cut, valued
from shared import settings
from shared.errors import SettingsError
from shared.messages import RolloutGroup, Sample, Score, ScoreStatus

_AT_ONCE_S = 0.002
"""How long a pattern may hold the event loop."""
PATTERN_TIMEOUT_S = 1.0
"""How long a pattern may take in all: status ``timeout``, value 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One pair of tags: where its opening tag begins and its closing tag ends, in characters."""

    start: int
    end: int


class FormatChecker:
    """Score the share of declared rules that a completion keeps.

    Raises:
        SettingsError: no rule is declared, or the pattern is no regular expression.
    """

    def __init__(self, scorer: settings.FormatScorer) -> None:
        self.name = scorer.name
        self._scorer = scorer
        try:
            self._pattern = regex.compile(scorer.pattern, regex.DOTALL) if scorer.pattern else None
        except regex.error as error:
            raise SettingsError(
                f"expected a regular expression as pattern of scorer {scorer.name!r}, found {scorer.pattern!r} "
                f"({error}): change pattern in [[reward.scorers]]"
            ) from error
        if not (scorer.tags or scorer.pattern or scorer.min_characters or scorer.max_characters or scorer.needs_stop):
            raise SettingsError(
                f"expected at least one rule for scorer {scorer.name!r}, found none: "
                "give it tags, pattern, min_characters, max_characters or needs_stop in [[reward.scorers]]"
            )

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Nothing to give back."""

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Check each sample."""
        return [await self._check(sample) for sample in group.samples]

    async def _check(self, sample: Sample) -> Score:
        try:
            matches = await self._matches(sample.text)
        except TimeoutError:
            return valued(self.name, ScoreStatus.TIMEOUT, 0.0, f"pattern took longer than {PATTERN_TIMEOUT_S:g} s")
        rules = list(self._rules(sample, matches))
        broken = [rule for rule in rules if rule]
        if not broken:
            return valued(self.name, ScoreStatus.OK, 1.0)
        return valued(self.name, ScoreStatus.WRONG_FORMAT, 1 - len(broken) / len(rules), broken[0])

    async def _matches(self, text: str) -> bool:
        pattern = self._pattern
        if pattern is None:
            return True
        try:
            return pattern.fullmatch(text, timeout=_AT_ONCE_S) is not None
        except TimeoutError:
            return await asyncio.to_thread(
                lambda: pattern.fullmatch(text, timeout=PATTERN_TIMEOUT_S, concurrent=True) is not None
            )

    def _rules(self, sample: Sample, matches: bool) -> Iterator[str]:
        """Yield for each declared rule how it is broken, or nothing ("")."""
        text, rules = sample.text, self._scorer
        found = [(rule, spans(text, rule.tag)) for rule in rules.tags]
        for rule, places in found:
            yield _broken_tag(rule, places, text)
        if len(rules.tags) > 1:
            missing = [rule.tag for rule, places in found if rule.required and not places]
            yield (
                f"expected <{missing[0]}> in its place"
                if missing
                else _broken_order([(rule.tag, places[0]) for rule, places in found if places])
            )
        if rules.nothing_outside and rules.tags:
            yield _broken_outside(text, [span for _, places in found for span in places])
        if self._pattern is not None:
            yield "" if matches else "expected text that matches the pattern"
        if rules.min_characters or rules.max_characters is not None:
            yield _broken_length(len(text), rules.min_characters, rules.max_characters)
        if rules.needs_stop:
            yield "expected an end, found its length limit" if is_cut(sample) else ""


def spans(text: str, tag: str) -> list[Span]:
    """Return every ``<tag>…</tag>`` in ``text``, first opening with first closing after it."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    found: list[Span] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        position = end + len(closing)
        found.append(Span(start, position))
    return found


def _broken_tag(rule: settings.TagRule, places: list[Span], text: str) -> str:
    openings, closings = text.count(f"<{rule.tag}>"), text.count(f"</{rule.tag}>")
    if openings != closings or len(places) < min(openings, 1):
        return f"expected <{rule.tag}> closed by </{rule.tag}>, found {openings} and {closings}"
    if rule.required and not places:
        return f"expected <{rule.tag}>…</{rule.tag}>, found none"
    if rule.once and openings > 1:
        return f"expected <{rule.tag}> once, found it {openings} times"
    return ""


def _broken_order(firsts: list[tuple[str, Span]]) -> str:
    for (before, earlier), (after, later) in pairwise(firsts):
        if later.start < earlier.end:
            return f"expected <{after}> after </{before}>"
    return ""


def _broken_outside(text: str, inside: list[Span]) -> str:
    position = 0
    for span in sorted(inside, key=lambda span: span.start):
        if text[position : max(position, span.start)].strip():
            return "expected nothing outside the tags"
        position = max(position, span.end)
    return "expected nothing outside the tags" if text[position:].strip() else ""


def _broken_length(characters: int, least: int, most: int | None) -> str:
    if characters < least:
        return f"expected at least {least} characters, found {characters}"
    if most is not None and characters > most:
        return f"expected at most {most} characters, found {characters}"
    return ""
