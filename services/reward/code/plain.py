"""Plain data: what a program's results are compared as. Equality is by exact type, so that nothing stands for something else.

::

    None  bool  int  float  str  list  tuple  set  dict         True is not 1, 1 is not 1.0, [1] is not (1,)

With a tolerance t > 0 an int and a float are numbers of one kind, and equal where |a - b| <= t · max(1, |a|, |b|);
members of sets and keys of dicts stay exact. ``nan`` equals nothing, as in Python.

What an assert's call returns comes out of the sandbox as JSON with three tags, which :func:`untagged` takes off::

    (1, [2])  ──▶  {"tuple": [1, [2]]}        {3}  ──▶  {"set": [3]}        {4: "x"}  ──▶  {"dict": [[4, "x"]]}
"""

import math
from collections.abc import Hashable
from typing import Any, TypeAlias

from shared.messages import Json

Plain: TypeAlias = Any
"""None, bool, int, float, str, or a list, tuple, set, frozenset or dict of plain data: of exactly these types."""


def equal(one: Plain, other: Plain, tolerance: float = 0.0) -> bool:
    """Return whether two pieces of plain data are the same."""
    if tolerance > 0 and _is_number(one) and _is_number(other):
        return _close(one, other, tolerance)
    if isinstance(one, (set, frozenset)) and isinstance(other, (set, frozenset)):
        return {_exact(member) for member in one} == {_exact(member) for member in other}
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        left, right = ({_exact(key): value for key, value in side.items()} for side in (one, other))
        return left.keys() == right.keys() and all(equal(value, right[key], tolerance) for key, value in left.items())
    return bool(one == other)


def same_text(expected: str, found: str, tolerance: float = 0.0) -> bool:
    r"""Return whether two standard outputs are the same, but for white space at the ends of lines and of the whole.

    With a tolerance, words of a line (between white space) that are both decimal numbers are compared as numbers.

    >>> same_text("1 2\n3", "1 2  \r\n3\n\n"), same_text("1 2", "1  2"), same_text("1.0 x", "1.0000001 x", 1e-6)
    (True, False, True)
    """
    ours, theirs = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, found))
    if ours == theirs or tolerance <= 0:
        return ours == theirs
    return len(ours) == len(theirs) and all(_same_line(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def untagged(value: Json) -> Plain:
    """Return the data of a tagged JSON value.

    Raises:
        ValueError: a tag is not one of the three.
        TypeError: a member of a set, or a key, that cannot be one.
        RecursionError: it is nested too deeply.
    """
    if isinstance(value, list):
        return [untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": [*items], **others} if not others:
            return tuple(untagged(item) for item in items)
        case {"set": [*items], **others} if not others:
            return {untagged(item) for item in items}
        case {"dict": [*pairs], **others} if not others:
            return dict(_pair(pair) for pair in pairs)
    raise ValueError("expected a tagged value")


def _pair(pair: Json) -> tuple[Plain, Plain]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError("expected a key and its value")
    return untagged(pair[0]), untagged(pair[1])


def _exact(member: Plain) -> Hashable:
    """Return a key that is equal only for members of equal types."""
    if isinstance(member, tuple):
        return ("tuple", *(_exact(item) for item in member))
    if isinstance(member, frozenset):
        return ("set", frozenset(_exact(item) for item in member))
    return (type(member).__name__, member)


def _is_number(value: Plain) -> bool:
    return type(value) in (int, float)


def _close(one: float, other: float, tolerance: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an int beyond floats
        return one == other


def _same_line(expected: str, found: str, tolerance: float) -> bool:
    ours, theirs = expected.split(), found.split()
    return len(ours) == len(theirs) and all(_same_word(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _same_word(expected: str, found: str, tolerance: float) -> bool:
    if expected == found:
        return True
    try:
        return _close(float(expected), float(found), tolerance)
    except ValueError:
        return False
