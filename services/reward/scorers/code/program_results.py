r"""Read a program's results and output in process, if they are small plain data.

::

    at most 16 KiB of None bool int float str list tuple set frozenset dict     compared here
    more, or another type (Counter, Decimal, an iterator, …)                    :class:`Elsewhere`: a clean interpreter

16 KiB hold at most 800 integers whose hashes all collide, a set built in 2 ms; 40,000 would take 10 s.
"""

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias

from penstock.services.reward.executor.inside import comparison, plain_data
from penstock.shared.bus.messages import Json

LONGEST = 16 << 10
"""Maximum characters of JSON text."""
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_LONGEST_NUMBER = 4000
_MOST_DIGITS = 4300
"""Of integers that Python reads, outside the sandbox."""
Plain: TypeAlias = Any
"""None, bool, int, float, str, or a list, tuple, set, frozenset or dict of plain data."""


class Elsewhere(Exception):
    """The value is too large, or of a type that only a clean interpreter may compare."""


def read(text: str) -> Json:
    if len(text) > LONGEST:
        raise Elsewhere("long text")
    try:
        value: Json = json.loads(text)
    except ValueError as error:
        if len(text) <= _MOST_DIGITS:
            raise
        raise Elsewhere("perhaps a long integer") from error
    return value


def rebuilt(value: Json) -> Plain:
    try:
        return plain_data.rebuilt(value, plain_data.SIMPLE)
    except LookupError as error:
        raise Elsewhere(f"the tag {error}") from error


def same_text(expected: str, printed: str, tolerance: float = 0.0) -> bool:
    r"""Compare two outputs, ignoring white space at the ends of lines and of the whole.

    Lines of numbers are compared by value, but whole numbers digit by digit: 0.50 is 0.5, and 007 is not 7. With a
    tolerance, words that are decimal numbers are compared as numbers. The time depends on ``expected`` only: longer output
    is not read to its end.

    >>> same_text("1 2\n3", "1 2  \r\n3\n\n"), same_text("a b", "a  b"), same_text("0.5 7", "0.50 7")
    (True, False, True)
    >>> same_text("0.5 x", "0.50 x"), same_text("0.5 x", "0.5000001 x", 1e-6)
    (False, True)
    """
    return _same_lines(expected.rstrip(), printed.rstrip(), lambda a, b: _same_line(a.rstrip(), b.rstrip(), tolerance))


def same_text_as_livecodebench(expected: str, printed: str, _: float = 0.0) -> bool:
    """Compare two outputs as LiveCodeBench's ``grade_stdio`` does, with lines of decimals by value.

    >>> same_text_as_livecodebench("0.5 7", " 0.50 007"), same_text_as_livecodebench("x 0.5", "x 0.50")
    (True, False)
    """
    return _same_lines(expected.strip(), printed.strip(), lambda a, b: _same_decimals(a.strip(), b.strip()))


def _same_decimals(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    try:
        ours = [Decimal(word) for word in expected.split()]
        return ours == [Decimal(word) for word in printed.split(maxsplit=len(ours))]
    except ArithmeticError:
        return False


def _same_lines(ours: str, theirs: str, same_line: Callable[[str, str], bool]) -> bool:
    if ours == theirs:
        return True
    if ours.count("\n") != theirs.count("\n"):
        return False
    start = end = -1
    for line in ours.split("\n"):
        start, end = end + 1, theirs.find("\n", end + 1)
        other = theirs[start : end if end >= 0 else None]
        if not same_line(line, other):
            return False
    return True


def _same_line(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed:
        return True
    spaces = None if tolerance > 0 else " "
    ours = expected.split(spaces)
    if tolerance <= 0 and not all(map(_NUMBER.fullmatch, ours)):
        return False
    theirs = printed.split(spaces, maxsplit=len(ours))
    return len(ours) == len(theirs) and all(_same_word(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _same_word(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed:
        return True
    if tolerance <= 0:
        return _is_finite(expected) and _is_finite(printed) and _same_value(expected, printed)
    numbers = _number(expected), _number(printed)
    return None not in numbers and comparison.close(*numbers, tolerance)


def _is_finite(word: str) -> bool:
    return len(word) <= _LONGEST_NUMBER and bool(_NUMBER.fullmatch(word)) and "n" not in word.lower()


def _same_value(expected: str, printed: str) -> bool:
    if expected.lstrip("+-").isdigit() and printed.lstrip("+-").isdigit():
        return False
    try:
        return Decimal(expected) == Decimal(printed)
    except ArithmeticError:  # an exponent beyond those of Decimal
        return False


def _number(word: str) -> float | None:
    if len(word) > _LONGEST_NUMBER or not _NUMBER.fullmatch(word):
        return None
    if word.lstrip("+-").isdigit():
        return int(word)
    value = float(word)
    return None if math.isinf(value) and "inf" not in word.lower() else value
