"""Bounds and inequality of sympy expressions without evaluating them.

::

    differ      values modulo a prime differ
    too_large   computing it would make numbers or sums beyond the limits

sympy expands sums and powers before comparing: hours for ``9^{9^9}``, seconds for ``(x+y+z)^{50}``.
"""

import dataclasses
import math
from typing import Any

_PRIME = 2**64 - 59
_LARGEST_BITS = 2.0**20
_MOST_TERMS = 2_000.0
_LONGEST_EXPONENT_BITS = 1_000
_MULTIPLIER = 0x9E3779B97F4A7C15
_TRANSCENDENTAL = {"Exp1": 3, "Pi": 5}
"""Transcendental numbers are independent values, like letters."""


def differ(left: Any, right: Any) -> bool:
    """Compares values modulo a prime, with one value per letter regardless of case."""
    try:
        values = [_residue(expression) for expression in (left, right)]
    except RecursionError:
        return False
    return None not in values and values[0] != values[1]


def _residue(expression: Any) -> int | None:
    kind = type(expression).__name__
    if getattr(expression, "is_Rational", False):
        return _quotient(int(expression.p), int(expression.q))
    if kind == "Symbol":
        return _of_letter(expression.name)
    if kind in _TRANSCENDENTAL:
        return pow(_MULTIPLIER, _TRANSCENDENTAL[kind], _PRIME)
    if kind == "Pow":
        return _power(*expression.args)
    if kind not in ("Add", "Mul"):
        return None
    total = 0 if kind == "Add" else 1
    for argument in expression.args:
        value = _residue(argument)
        if value is None:
            return None
        total = (total + value if kind == "Add" else total * value) % _PRIME
    return total


def _of_letter(name: str) -> int:
    """Case-insensitive, as in math-verify."""
    return pow(_MULTIPLIER, 7 + int.from_bytes(name.lower().encode(), "big") % _PRIME, _PRIME)


def _quotient(above: int, below: int) -> int | None:
    return above * pow(below, -1, _PRIME) % _PRIME if below % _PRIME else None


def _power(base: Any, exponent: Any) -> int | None:
    whole, value = _whole(exponent), _residue(base)
    if whole is None or value is None:
        return None
    return pow(value, whole, _PRIME) if whole >= 0 or value else None


def _whole(exponent: Any) -> int | None:
    kind = type(exponent).__name__
    if getattr(exponent, "is_Integer", False):
        return int(exponent.p) if int(exponent.p).bit_length() <= _LONGEST_EXPONENT_BITS else None
    if kind not in ("Pow", "Mul", "Add"):
        return None
    values = [_whole(argument) for argument in exponent.args]
    if None in values or _size(exponent).bits > _LONGEST_EXPONENT_BITS:
        return None
    numbers = [value for value in values if value is not None]
    if kind == "Pow":
        return numbers[0] ** numbers[1] if numbers[1] >= 0 else None
    return math.prod(numbers) if kind == "Mul" else sum(numbers)


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    """Upper bounds on the computed expression; letters count as 1."""

    bits: float = 1.0
    terms: float = 1.0
    value: float = 1.0


def too_large(expression: Any) -> bool:
    """Whether ``expression`` would make a number of over a million bits or a sum of over 2,000 terms."""
    size = _size(expression)
    return size.bits > _LARGEST_BITS or size.terms > _MOST_TERMS


def _size(expression: Any) -> _Size:
    if getattr(expression, "is_Rational", False):
        above, below = abs(int(expression.p)), int(expression.q)
        return _sized(
            max(above, below).bit_length() or 1, value=above / below if above.bit_length() < 1_000 else math.inf
        )
    parts = [_size(argument) for argument in getattr(expression, "args", ())]
    if not parts:
        return _Size()
    match type(expression).__name__:
        case "Add":
            return _sized(max(part.bits for part in parts) + len(parts), sum(part.terms for part in parts))
        case "Mul":
            return _sized(sum(part.bits for part in parts), math.prod(part.terms for part in parts))
        case "Pow":
            return _sized(parts[0].bits * parts[1].value, _multiplied_out(parts[0].terms, parts[1].value))
        case "factorial" | "factorial2" | "subfactorial" | "gamma":
            return _sized(parts[0].value * parts[0].bits)
        case "binomial":
            return _sized(parts[0].bits * parts[1].value)
    return _sized(max(part.bits for part in parts), max(part.terms for part in parts))


def _sized(bits: float, terms: float = 1.0, value: float | None = None) -> _Size:
    return _Size(bits, terms, value if value is not None else 2.0**bits if bits < 1_000 else math.inf)


def _multiplied_out(terms: float, power: float) -> float:
    if terms <= 1:
        return 1.0
    if power > _MOST_TERMS or terms > _MOST_TERMS:
        return math.inf
    times = max(1, math.ceil(power))
    return float(math.comb(int(terms) + times - 1, times))
