r"""Read a program's results and output in process, if they are small plain data.

::

    at most 16 KiB of None bool int float str list tuple set frozenset dict     compared here
    more, or another type (Counter, Decimal, an iterator, …)                    :class:`Elsewhere`: a clean interpreter

16 KiB hold at most 800 integers whose hashes all collide, a set built in 2 ms; 40,000 would take 10 s.
"""

import json
import math
import re
from typing import Any, TypeAlias

from services.reward.executor.inside import comparison, plain_data
from shared.bus.messages import Json

LONGEST = 16 << 10
"""Maximum characters of JSON text."""
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_LONGEST_NUMBER = 4000
Plain: TypeAlias = Any
"""None, bool, int, float, str, or a list, tuple, set, frozenset or dict of plain data."""


class Elsewhere(Exception):
    """The value is too large, or of a type that only a clean interpreter may compare."""


def read(text: str) -> Json:
    if len(text) > LONGEST:
        raise Elsewhere("long text")
    value: Json = json.loads(text)
    return value


def rebuilt(value: Json) -> Plain:
    try:
        return plain_data.rebuilt(value, plain_data.SIMPLE)
    except LookupError as error:
        raise Elsewhere(f"the tag {error}") from error


def same_text(expected: str, printed: str, tolerance: float = 0.0) -> bool:
    r"""Compare two outputs, ignoring white space at the ends of lines and of the whole.

    With a tolerance, words that are decimal numbers are compared as numbers. The time depends on ``expected`` only:
    longer output is not read to its end.

    >>> same_text("1 2\n3", "1 2  \r\n3\n\n"), same_text("1 2", "1  2"), same_text("1.0 x", "1.0000001 x", 1e-6)
    (True, False, True)
    """
    ours, theirs = expected.rstrip(), printed.rstrip()
    if ours == theirs:
        return True
    if ours.count("\n") != theirs.count("\n"):
        return False
    start = end = -1
    for line in ours.split("\n"):
        start, end = end + 1, theirs.find("\n", end + 1)
        other = theirs[start : end if end >= 0 else None]
        if not _same_line(line.rstrip(), other.rstrip(), tolerance):
            return False
    return True


def _same_line(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed or tolerance <= 0:
        return expected == printed
    ours = expected.split()
    theirs = printed.split(maxsplit=len(ours))
    return len(ours) == len(theirs) and all(_same_word(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _same_word(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed:
        return True
    numbers = _number(expected), _number(printed)
    return None not in numbers and comparison.close(*numbers, tolerance)


def _number(word: str) -> float | None:
    if len(word) > _LONGEST_NUMBER or not _NUMBER.fullmatch(word):
        return None
    if word.lstrip("+-").isdigit():
        return int(word)
    value = float(word)
    return None if math.isinf(value) and "inf" not in word.lower() else value
