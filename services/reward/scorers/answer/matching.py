"""Choose the comparisons that decide whether an answer equals the reference.

::

    reference, answer ──▶ notation ──▶ read: core, unit, percent sign, name ──▶ attempts, the strictest first
                                                                                 └── pairs of cores, all equal

An attempt names the lenient rules it needs, so the first that succeeds gives the verdict's rules. Words, relations,
lists and restated questions are decided here, because computer algebra misreads them.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator
from fractions import Fraction
from functools import lru_cache
from math import gcd

from penstock.services.reward.scorers.answer import relations, shapes
from penstock.services.reward.scorers.answer.mathematics import plain_numbers
from penstock.services.reward.scorers.answer.notation import plain, split
from penstock.services.reward.scorers.answer.prose import LONGEST as LONGEST_PROSE
from penstock.services.reward.scorers.answer.prose import is_prose, stated, without_opening
from penstock.services.reward.scorers.answer.units import DEGREE, Unit, split_unit
from penstock.services.reward.scorers.answer.words import has_words, is_text, same_text, swaps_case

LONGEST_FORMULA = 1_000
"""In characters; reading longer formulas takes minutes."""
_MOST_PARENTHESES = 16

_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|%|\\%)\s*\}|(?<=[0-9)}\s])percent)$")
_NAME = re.compile(r"(?P<name>\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?'?(?:\s*\(\s*[a-z](?:\s*,\s*[a-z])?\s*\))?|\([a-z],\s*[a-z](?:,\s*[a-z])?\))\s*=\s*(?P<rest>[^=].*)", re.DOTALL)  # fmt: skip
_LEADING = re.compile(r"(?:=|\\approx(?![A-Za-z]))\s*")
_COMPUTES = re.compile(
    r"\\(?:sum|i{0,3}nt|oint|prod|lim|limsup|liminf|gcd|lcm|det|max|min|sup|inf|bmod|pmod|mod|nabla|partial|operatorname)(?![A-Za-z])"
    r"|\\sqrt\s*\{\s*[0-9.]+(?:\s*\^\s*\{?[0-9]+\}?)?\s*(?:[-+*]|\\times|\\cdot)[0-9.^{}\s]*\}"
    r"|\\text\{\s*(?:lcm|gcd|det|mod)\s*\}|\\frac\s*\{\s*d[^{}]{0,20}\}\s*\{\s*d\s*[a-z]|\\begin\{[vV]matrix\}|\\l(?:ceil|floor)(?![A-Za-z])|(?<![A-Za-z\\])(?:gcd|lcm|det|max|min)\s*\("
)
_ARITHMETIC = re.compile(r"(?<=[0-9})%])\s*(?:[-+*/]|\\times|\\cdot|\\div)\s*(?!\s*10\s*\^)(?=[0-9(.\\{])")
_ONLY_NUMBERS = re.compile(r"(?:[0-9.,\s(){}+*/%-]|\\(?:times|cdot|div|frac|%))+")
_COMPUTED = re.compile(rf"{_ONLY_NUMBERS.pattern}(?:={_ONLY_NUMBERS.pattern})+")
"""``12 + 34 = 46``: numbers only."""
_FRACTION_TEXT = re.compile(
    r"[-+]?\s*(?:[0-9.,]+\s*/\s*[0-9.,]+|\\frac\s*(?:\{\s*[-+]?[0-9.,]+\s*\}\s*\{\s*[-+]?[0-9.,]+\s*\}|[0-9]{2}))"
)
_DEGREES_INSIDE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*\^\\circ")
_READ = re.compile(r"(?:[A-Za-z0-9\s+\-*/^_{}()\[\]|.,!=<>&\\:;%]|(?<=[A-Za-z)])')+")
"""Characters that computer algebra reads; it drops others, such as the prime of ``5'``."""
_DOTS = re.compile(r"\\[lc]?dots(?![A-Za-z])|\.\.\.")
_ORDINAL = re.compile(r"1st$|2nd$|3rd$|[0-9]th$")
_DIVIDED = re.compile(r"([0-9]{1,12})\s*\\div\s*([0-9]{1,12})")
_FUNCTIONS = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One way in which the answer may equal the reference."""

    pairs: tuple[tuple[str, str], ...]
    """All must be equal; empty if the texts already agree."""
    rules: frozenset[str] = frozenset()

    def under(self, *rules: str) -> "Attempt":
        return dataclasses.replace(self, rules=self.rules | set(rules))


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    r"""The parts of one text.

    >>> read("x = 50\\%").core, read("x = 50\\%").percent, read("x = 50\\%").name
    ('50', True, 'x')
    """

    core: str
    unit: Unit | None = None
    percent: bool = False
    name: str = ""
    """The lone symbol left of the equals sign."""
    chain: tuple[str, ...] = ()
    """Members before the core, which must equal it."""

    @property
    def relation(self) -> str:
        return f"{self.name}={self.core}" if self.name else self.core


def attempts(reference: str, answer: str, lenient: Collection[str]) -> tuple[Attempt, ...]:
    """Return the comparisons in order; empty means wrong. Only the end of a long answer is read."""
    return _attempts(reference, answer[-LONGEST_PROSE:], frozenset(lenient))


@lru_cache(maxsize=4096)
def _attempts(reference: str, answer: str, lenient: frozenset[str]) -> tuple[Attempt, ...]:
    made = list[Attempt]()
    expected = _reference(reference)
    for text, rules in _texts(answer, lenient):
        for attempt in _of_texts(expected, plain(text), lenient):
            candidate = attempt.under(*rules)
            if candidate.rules <= lenient and candidate not in made:
                made.append(candidate)
    return tuple(sorted(made, key=lambda attempt: len(attempt.rules)))


@lru_cache(maxsize=1024)
def _reference(text: str) -> str:
    text = plain(text)
    if is_prose(text) and ("$" in text or re.search(r"(?i)\banswer\b", text)):
        return plain(stated(text) or text)
    return text


def _texts(answer: str, lenient: frozenset[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if len(answer) <= LONGEST_FORMULA:
        yield answer, ()
    if "prose" in lenient and (opened := without_opening(answer)) != answer and len(opened) <= LONGEST_FORMULA:
        yield opened, ("prose",)
    if "prose" in lenient and is_prose(answer[-LONGEST_PROSE:]):
        claim = stated(answer)
        if claim is not None:
            yield claim, ("prose",)


def _of_texts(reference: str, answer: str, lenient: frozenset[str]) -> Iterator[Attempt]:
    if not reference or not answer or len(reference) > LONGEST_FORMULA:
        return
    if (same := same_text(reference, answer)) is not None:
        yield Attempt((), frozenset(same))
        return
    if re.search(r"\\[hv]?phantom", answer):  # shows nothing
        return
    reference, answer = relations.as_set(reference), relations.as_set(answer)
    if reference == answer == r"\emptyset":
        yield Attempt(())
        return
    if (ratio := shapes.same_ratio(reference, answer)) is not None:
        if ratio:
            yield Attempt(())
        return
    if shapes.is_literal(reference) or shapes.is_literal(answer):
        return
    inequalities = relations.compare(reference, answer)
    if inequalities is not None:
        yield from (Attempt(pairs) for pairs in inequalities)
        return
    yield from _of_lists(reference, answer, lenient)


def _of_lists(reference: str, answer: str, lenient: frozenset[str]) -> Iterator[Attempt]:
    reference = shapes.without_thousands(reference)
    if shapes.shape(reference) == "single":
        answer = shapes.without_thousands(answer)
    expected, given = shapes.plus_minus(_listed(reference)), shapes.plus_minus(_listed(answer))
    expected, given = relations.without_names(expected, given)
    if (pairs := relations.assignments(expected, given)) is not None:
        yield from (Attempt(pair) for pair in pairs)
        return
    given = shapes.spaced_list(expected, given)
    for shaped, rules in shapes.fitting(expected, given):
        yield from (attempt.under(*rules) for attempt in _of_readings(read(expected), read(shaped), shaped, lenient))


def _listed(text: str) -> str:
    listed = re.sub(
        r"\s*,?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\lor(?![A-Za-z]))\s*",
        ", ",
        text,
    )
    return text if has_words(listed) else listed


@lru_cache(maxsize=4096)
def read(text: str) -> Reading:
    text = _LEADING.sub("", text, count=1) if text.startswith(("=", r"\approx")) else text
    name, chain = "", tuple[str, ...]()
    match = _NAME.fullmatch(text)
    if match is not None and relations.is_symbol(match["name"]) and len(split(match["rest"])) == 1:
        name, (*chain_parts, text) = (
            match["name"],
            (part.strip() for part in re.split(r"(?<![<>!])=|\\approx(?![A-Za-z])", match["rest"])),
        )
        chain = tuple(chain_parts)
    elif _COMPUTED.fullmatch(text):
        *chain_parts, text = (part.strip() for part in text.split("="))
        chain = tuple(chain_parts)
    core, percents = _PERCENT.subn("", text) if text.count("%") <= 1 else (text, 0)
    core, unit = (core, None) if percents else split_unit(core)
    if unit is not None and unit == DEGREE and _FUNCTIONS.search(core):
        core, unit = text, None
    return Reading(_parenthesised(_radians(core)).strip(), unit, bool(percents), re.sub(r"\s", "", name), chain)


def _radians(text: str) -> str:
    return _DEGREES_INSIDE.sub(r"{\\frac{\1\\pi}{180}}", text) if r"^\circ" in text else text


def _parenthesised(text: str) -> str:
    for _ in range(_MOST_PARENTHESES):
        if not (
            text.startswith("(") and text.endswith(")") and len(split(text[1:-1])) == 1 and shapes.closed(text[1:-1])
        ):
            break
        text = text[1:-1].strip()
    return text


def _of_readings(expected: Reading, given: Reading, answer: str, lenient: frozenset[str]) -> Iterator[Attempt]:
    if _differently_solved(expected, given):
        if not any(has_words(reading.core) for reading in (expected, given)):
            yield Attempt(((expected.relation, given.relation),))
        return
    if not _comparable(expected, given):
        return
    restated = restates(given.core if given.chain and not given.name else answer)
    rules = {"restating"} if restated and not restates(expected.core) else set[str]()
    if rules - lenient:
        return
    chain = tuple((expected.core, member) for member in given.chain)
    for attempt in _of_quantities(expected, given):
        yield Attempt((*attempt.pairs, *chain), attempt.rules | rules)


def _differently_solved(expected: Reading, given: Reading) -> bool:
    """Whether to compare two relations as they are: ``y = 2x`` and ``x = y/2``."""
    if expected.name and given.name:
        return expected.name != given.name
    return bool(expected.name and "=" in given.core) or bool(given.name and "=" in expected.core)


def _comparable(expected: Reading, given: Reading) -> bool:
    """No words, and no relation or sum with infinity on one side only."""
    if not all(_is_mathematics(reading.core) for reading in (expected, given)):
        return False
    if len(expected.core) == len(given.core) == 1 and expected.core.isalpha() and given.core.isalpha():
        return expected.core == given.core
    if swaps_case(expected.core, given.core) or bool(_DOTS.search(expected.core)) != bool(_DOTS.search(given.core)):
        return False
    related = [relations.is_relation(reading.core) for reading in (expected, given)]
    if related[0] != related[1]:
        return False
    return not (related[0] and (expected.name or given.name))


def _is_mathematics(core: str) -> bool:
    if _ORDINAL.search(core) is not None:
        return False
    if plain_numbers.read(core) is not None:
        return True
    return _READ.fullmatch(core) is not None and not (has_words(core) or is_text(core) or shapes.beyond_infinity(core))


def _of_quantities(expected: Reading, given: Reading) -> Iterator[Attempt]:
    pair = (expected.core, given.core)
    if expected.percent != given.percent:
        yield Attempt(((_share(expected), _share(given)),))
        if _above_one(expected.core) and not (expected.unit or given.unit):
            yield Attempt((pair,), frozenset({"percent"}))
            if expected.percent and plain_numbers.read(expected.core) is not None:
                yield Attempt((pair,), frozenset({"units"}))
        return
    yield from _of_units(expected.unit, given.unit, pair)
    yield from _of_bases(pair)


def _share(reading: Reading) -> str:
    return _scaled(reading.core, Fraction(1, 100)) if reading.percent else reading.core


def _above_one(core: str) -> bool:
    number = plain_numbers.read(core)
    return number is None or abs(number.value) > 1


def _of_units(expected: Unit | None, given: Unit | None, pair: tuple[str, str]) -> Iterator[Attempt]:
    reference, answer = pair
    forgiving = ("units",) if expected else ("added_unit", "units")
    if _dimensions(expected) == _dimensions(given):
        ratio = (expected.factor if expected else Fraction(1)) / (given.factor if given else Fraction(1))
        yield Attempt(((_scaled(reference, ratio), answer),))
    elif DEGREE in (expected, given) and not (_dimensions(expected) and _dimensions(given)):
        yield Attempt(((_in_radians(reference, expected), _in_radians(answer, given)),))
        yield from (Attempt((pair,), frozenset({rule})) for rule in forgiving)
    elif not (_dimensions(expected) and _dimensions(given)):
        yield from (Attempt((pair,), frozenset({rule})) for rule in forgiving)


def _dimensions(unit: Unit | None) -> tuple[tuple[str, int], ...]:
    return unit.dimensions if unit else ()


def _in_radians(core: str, unit: Unit | None) -> str:
    number = plain_numbers.read(core)
    if unit is None:
        return core
    if number is not None:
        return rf"{plain_numbers.written(number.value / 180)}\pi"
    return rf"\frac{{({core})\pi}}{{180}}"


def _scaled(core: str, ratio: Fraction) -> str:
    if ratio == 1:
        return core
    number = plain_numbers.read(core)
    if number is not None:
        return plain_numbers.written(number.value * ratio)
    return rf"({core})\cdot{plain_numbers.written(ratio)}"


def _of_bases(pair: tuple[str, str]) -> Iterator[Attempt]:
    """Compare the digits alone if one side omits its base."""
    expected, given = (plain_numbers.read(core) for core in pair)
    if expected is not None and given is not None and bool(expected.digits) != bool(given.digits):
        digits = [number.digits or core.upper() for number, core in ((expected, pair[0]), (given, pair[1]))]
        if digits[0] == digits[1]:
            yield Attempt((), frozenset({"bases"}))


def restates(text: str) -> bool:
    r"""Whether ``text`` leaves something to compute: a sum, a limit, a derivative, or 12+34.

    >>> restates(r"\sum_{k=1}^{9} k"), restates("12+34"), restates(r"3\times 10^8"), restates("2^{31}-1")
    (True, True, False, False)
    """
    if _COMPUTES.search(text):
        return True
    if (divided := _DIVIDED.fullmatch(text)) is not None:
        return gcd(int(divided[1]), int(divided[2])) != 1 or divided[2] == "1"
    if _ONLY_NUMBERS.fullmatch(text) is None or _FRACTION_TEXT.fullmatch(text) or shapes.is_literal(text):
        return False
    return any(_ARITHMETIC.search(_without_fractions(part)) for part in split(text))


def _without_fractions(text: str) -> str:
    return (
        _FRACTION_TEXT.sub(" 1", text)
        if re.search(r"\\frac", text)
        else re.sub(r"(?<![0-9/)])\s*([0-9]+)\s*/\s*([0-9]+)(?![0-9/])", r"\1", text)
    )
