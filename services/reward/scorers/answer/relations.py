"""Equations and inequalities as answers: named values, and intervals written with ``<``."""

import re
from itertools import pairwise

from penstock.services.reward.scorers.answer.mathematics import plain_numbers
from penstock.services.reward.scorers.answer.notation import split
from penstock.services.reward.scorers.answer.shapes import shape
from penstock.services.reward.scorers.answer.words import unwrapped

_RELATION = re.compile(
    r"(?<!\\)[=<>]|\\(?:leq|geq|neq|approx|equiv|sim|simeq|cong|in|notin|ni|subset|subseteq|supset|to|rightarrow|Rightarrow|implies|iff|propto|mid|nmid|ll|gg)(?![A-Za-z])"
)
_SYMBOL = r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi|chi|psi|omega|ell|Delta|Omega))(?:_\{?[A-Za-z0-9]{1,8}\}?)?"
_NAME = re.compile(
    rf"{_SYMBOL}'?(?:\s*\(\s*[a-z](?:\s*,\s*[a-z])?\s*\))?|[A-Za-z]{{2,20}}|\([a-z](?:,\s*[a-z]){{1,2}}\)"
)
_ASSIGNMENT = re.compile(rf"({_SYMBOL})\s*=\s*([^=<>]+)")
_SIDE = r"((?:(?!\\leq|\\geq|\\neq)[^<>=])+?)"
_COMPARED = re.compile(rf"\s*{_SIDE}\s*(<|>|\\leq|\\geq)\s*{_SIDE}\s*(?:(<|>|\\leq|\\geq)\s*{_SIDE}\s*)?")
_MEMBER = re.compile(rf"\s*({_SYMBOL})\s*\\in(?![A-Za-z])\s*(.+)")
_OR = re.compile(r"\s*(?:,\s*)?(?:\\text\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z]))\s*")

_REALS = r"(?:\\mathbb\s*\{?\s*R\s*\}?|\\R(?![A-Za-z])|(?i:(?:\\text\s*\{\s*)?all\s+real(?:s|\s+numbers)(?:\s*\})?))"
_ALL_REAL = re.compile(
    rf"(?:{_SYMBOL}\s*\\in(?![A-Za-z])\s*)?{_REALS}(?:\s*(?:\\setminus|\\backslash|-)\s*\\\{{(?P<without>.+)\\\}})?"
)
_NOT_EQUAL = re.compile(rf"({_SYMBOL})\s*\\neq\s*(?P<without>.+)")
_BUILT = re.compile(
    rf"\\\{{\s*({_SYMBOL})\s*(?:\\in\s*{_REALS}\s*)?(?:\\mid(?![A-Za-z])|\||:)\s*(?P<condition>.+)\\\}}"
)
_EMPTY = re.compile(
    r"(?i)(?:there\s+(?:is|are)\s+)?(?:no\s+(?:real\s+)?solutions?(?:\s+exists?)?|(?:the\s+)?empty\s+set)"
)

_MOST_POINTS = 16
Pairs = tuple[tuple[str, str], ...]


def as_set(text: str) -> str:
    r"""Return a set that is written in words, or by a condition, in the notation of intervals.

    >>> as_set(r"\mathbb{R}\setminus\{2\}"), as_set(r"\{x \mid x > 3\}"), as_set(r"\text{no solution}")
    ('(-\\infty,2)\\cup (2,\\infty)', 'x > 3', '\\emptyset')
    """
    if _EMPTY.fullmatch(unwrapped(text)):
        return r"\emptyset"
    if (built := _BUILT.fullmatch(text)) is not None and is_relation(built["condition"]):
        return built["condition"].strip()
    if (reals := _ALL_REAL.fullmatch(text)) is not None:
        return _without(reals["without"]) or text
    return text


def _without(points: str | None) -> str | None:
    """Return the real numbers without ``points``; None unless all are plain numbers."""
    parts = split(points) if points else []
    numbers = [(number.share, part) for part in parts if (number := plain_numbers.read(part)) is not None]
    if len(numbers) < len(parts) or len(parts) > _MOST_POINTS:
        return None
    ends = [r"-\infty", *(part for _, part in sorted(numbers)), r"\infty"]
    return r"\cup ".join(f"({low},{high})" for low, high in pairwise(ends))


def is_relation(text: str) -> bool:
    return _RELATION.search(text) is not None


def is_symbol(name: str) -> bool:
    r"""``x``, ``\theta``, ``a_1``, ``f(x)`` or ``Area``."""
    return _NAME.fullmatch(name.strip()) is not None


def compare(reference: str, answer: str) -> tuple[Pairs, ...] | None:
    """Return the intervals to compare; None if no side is an inequality."""
    expected, given = _solved(reference), _solved(answer)
    if expected is not None and given is not None:
        return (((expected[1], given[1]),),) if expected[0] == given[0] else ()
    if expected is not None and _is_region(answer):
        return (((expected[1], answer),),)
    if given is not None and _is_region(reference):
        return (((reference, given[1]),),)
    return None


def _is_region(text: str) -> bool:
    return not is_relation(text) and (shape(text) in ("round", "other") or r"\cup" in text)


def _solved(text: str) -> tuple[str, str] | None:
    if not is_relation(text) or len(text) > 300:
        return None
    intervals, variables = list[str](), set[str]()
    for part in _OR.split(text):
        solved = _interval(part)
        if solved is None:
            return None
        variables.add(solved[0])
        intervals.append(solved[1])
    return (variables.pop(), r"\cup ".join(intervals)) if len(variables) == 1 else None


def _interval(text: str) -> tuple[str, str] | None:
    if (member := _MEMBER.fullmatch(text)) is not None:
        return (member[1], member[2].strip()) if _is_region(member[2].strip()) else None
    if (unequal := _NOT_EQUAL.fullmatch(text)) is not None and (region := _without(unequal["without"])) is not None:
        return unequal[1], region
    match = _COMPARED.fullmatch(text)
    if match is None:
        return None
    left, first, middle, second, right = match.groups()
    if second is None:
        return _one_sided(left.strip(), first, middle.strip())
    if not re.fullmatch(_SYMBOL, middle.strip()) or _points_up(first) != _points_up(second):
        return None
    if not _points_up(first):
        left, first, right, second = right, second, left, first
    return middle.strip(), f"{_opening(first)}{left.strip()},{right.strip()}{_closing(second)}"


def _one_sided(left: str, sign: str, right: str) -> tuple[str, str] | None:
    if re.fullmatch(_SYMBOL, left) and not re.search(
        r"(?<!\\)[A-Za-z](?![A-Za-z]*\{)", re.sub(r"\\[A-Za-z]+", "", right)
    ):
        below = _points_up(sign)
        return (left, rf"(-\infty,{right}{_closing(sign)}") if below else (left, rf"{_opening(sign)}{right},\infty)")
    if re.fullmatch(_SYMBOL, right) and not re.fullmatch(_SYMBOL, left):
        return _one_sided(right, {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}[sign], left)
    return None


def _points_up(sign: str) -> bool:
    return sign in ("<", r"\leq")


def _opening(sign: str) -> str:
    return "(" if sign in ("<", ">") else "["


def _closing(sign: str) -> str:
    return ")" if sign in ("<", ">") else "]"


def without_names(reference: str, answer: str) -> tuple[str, str]:
    """Reduce ``x = 1, x = 2`` to ``1, 2`` if the other side has no names."""
    expected, given = _values(reference), _values(answer)
    if given is not None and not is_relation(reference):
        return reference, given
    if expected is not None and not is_relation(answer):
        return expected, answer
    return reference, answer


def _values(text: str) -> str | None:
    members = [_ASSIGNMENT.fullmatch(part) for part in split(text)]
    if len(members) < 2:
        return None
    names, values = set[str](), list[str]()
    for member, part in zip(members, split(text), strict=True):
        if member is None:
            if is_relation(part):
                return None
            values.append(part)
        else:
            names.add(member[1].partition("_")[0])
            values.append(member[2].strip())
    return ", ".join(values) if len(names) == 1 else None


def assignments(reference: str, answer: str) -> tuple[Pairs, ...] | None:
    """Return the values to compare by name; None if a side is not a list of ``x = 1, y = 2``."""
    expected, given = _named(reference), _named(answer)
    if expected is None or given is None:
        return None
    if expected.keys() != given.keys():
        return ()
    return (tuple((value, given[name]) for name, value in expected.items()),)


def _named(text: str) -> dict[str, str] | None:
    parts = split(text)
    members = [match for part in parts if (match := _ASSIGNMENT.fullmatch(part)) is not None]
    named = {re.sub(r"[{}\s]", "", match[1]): match[2].strip() for match in members}
    return named if len(parts) > 1 and len(named) == len(parts) else None
