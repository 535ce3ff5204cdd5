"""Whether a sympy expression is zero: shown by digits with tracked accuracy, or by rational arithmetic; never by chopping.

::

    rational ──▶ exact        constant ──▶ every part's size ──▶ digits that no part can hide behind ──▶ zero, or not
                              with letters ──▶ not zero at one of a few points, or undecided

sympy's ``evalf`` reports how many bits of a result are right. A value with right bits is not zero. One without any, at
more digits than its smallest part and its length ask for, is zero: the uniformity conjecture (Richardson 2007, "Zero
tests for constants in simple scientific computation") bounds how small an expression of a length can be otherwise.
"""

import math
from typing import Any

_LEAST_DIGITS = 60
_DIGITS_PER_NODE = 2
_MOST_DIGITS = 4_000
"""An expression that needs more is undecided."""
_BITS_PER_DIGIT = math.log2(10)
_POINTS = (3, 8, 21, 55)
"""Numerators over 13 of the letters' values: positive, so that the usual identities of roots and logarithms hold."""
_INEXACT = ("Integral", "Sum", "Product", "Limit", "Derivative", "AccumBounds", "Order")
"""Functions whose digits have no bound on their error."""


def is_zero(expression: Any) -> bool | None:
    """None if undecided: too many digits, not a number, or letters and no point at which it differs from 0."""
    if expression.is_Rational:
        return bool(expression == 0)
    if any(type(part).__name__ in _INEXACT for part in _parts(expression)):
        return None
    if not expression.free_symbols:
        return _constant_is_zero(expression)
    at_points = (_constant_is_zero(_at(expression, shift)) for shift in range(len(_POINTS)))
    return False if any(verdict is False for verdict in at_points) else None


def _at(expression: Any, shift: int) -> Any:
    from sympy import Rational

    letters = sorted(expression.free_symbols, key=str)
    values = {
        letter: Rational(_POINTS[(place + shift) % len(_POINTS)] + place, 13) for place, letter in enumerate(letters)
    }
    return expression.subs(values)


def _constant_is_zero(constant: Any) -> bool | None:
    if constant.is_Rational:
        return bool(constant == 0)
    if constant.has(*_infinities()) or constant.free_symbols:
        return None
    if not _is_zero_at(constant, _LEAST_DIGITS):
        return False
    digits = _digits(constant)
    return None if digits > _MOST_DIGITS else _is_zero_at(constant, digits)


def _infinities() -> tuple[Any, ...]:
    from sympy import nan, oo, zoo

    return (nan, oo, -oo, zoo)


def _digits(constant: Any) -> float:
    """Return the digits behind which no part of ``constant`` can hide."""
    parts = list(_parts(constant))
    sizes = [_size(part) for part in parts if not part.is_Atom or part.is_Rational]
    return _LEAST_DIGITS + _DIGITS_PER_NODE * len(parts) + 2 * max(sizes, default=0.0)


def _parts(expression: Any) -> Any:
    from sympy import preorder_traversal

    return preorder_traversal(expression)


def _size(part: Any) -> float:
    """Return the decimal places before or after the point of ``part``."""
    if part.is_Rational:
        return max(abs(int(part.p)).bit_length(), int(part.q).bit_length()) / _BITS_PER_DIGIT
    return max((abs(_exponent(value)) for value in _evaluated(part, _LEAST_DIGITS)[:2]), default=0.0) / _BITS_PER_DIGIT


def _exponent(value: Any) -> int:
    """Return the binary exponent of an mpf."""
    return int(value[2] + value[3]) if value and value[1] else 0


def _is_zero_at(constant: Any, digits: float) -> bool:
    real, imaginary, real_bits, imaginary_bits = _evaluated(constant, digits)
    for value, bits in ((real, real_bits), (imaginary, imaginary_bits)):
        if value and value[1] and bits is not None and bits > 1:
            return False
    return True


def _evaluated(constant: Any, digits: float) -> Any:
    from sympy.core.evalf import evalf

    bits = int(digits * _BITS_PER_DIGIT)
    return evalf(constant, bits, {"maxprec": 2 * bits})
