r"""Standard library only, since clean interpreters run it too.

Equality is Python's own. With a tolerance t > 0 numbers, but not bools, are equal if \|a - b\| <= t · max(1, \|a\|,
\|b\|), also in lists, tuples and values of dicts, but not in sets and keys.
"""

import ast
import decimal
import fractions
import functools
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from . import plain_data

_SHOWN = 60
_NUMBERS = (int, float, fractions.Fraction, decimal.Decimal)


def equal(left: Any, right: Any, tolerance: float) -> bool:
    if tolerance <= 0:
        return bool(left == right)
    if _is_number(left) and _is_number(right):
        return close(left, right, tolerance)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(equal(a, b, tolerance) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(value, right[key], tolerance) for key, value in left.items())
    return bool(left == right)


def close(left: Any, right: Any, tolerance: float) -> bool:
    if not math.isfinite(tolerance) or not _is_finite(left) or not _is_finite(right):
        return bool(left == right)
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
    a, b = fractions.Fraction(left), fractions.Fraction(right)
    largest: fractions.Fraction = max(fractions.Fraction(1), abs(a), abs(b))
    return abs(a - b) <= fractions.Fraction(tolerance) * largest


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, fractions.Fraction)) or math.isfinite(value)


def holds(check: str, texts: Mapping[str, str], tolerance: float) -> str:
    """Evaluate an assert's check on tagged JSON texts by name; return "" or why it does not hold."""
    try:
        names = {name: plain_data.rebuilt(json.loads(text)) for name, text in texts.items()}
        tree = ast.parse(check, mode="eval")
        if tolerance > 0:
            tree = ast.fix_missing_locations(tolerant(tree))
            names |= tolerant_names(tolerance)
        return (
            ""
            if eval(compile(tree, "check.py", "eval"), names)
            else f"{check[:_SHOWN]} does not hold for {reprlib.repr(list(texts.values()))}"
        )
    except Exception as error:  # noqa: BLE001 (whatever the assert raises, it does not hold)
        return f"{check[:_SHOWN]} ended in {type(error).__name__}"


def matches(text: str, accepted: Sequence[str], tolerance: float) -> str:
    """Compare a result, as JSON text, with values as tagged JSON texts; return "" or how it differs."""
    value, others = json.loads(text), [plain_data.rebuilt(json.loads(tagged)) for tagged in accepted]
    right = any(other == value or equal(other, value, tolerance) for other in others)
    return "" if right else f"expected {reprlib.repr(others[0])}, found {reprlib.repr(value)}"


def within(member: Any, whole: Any, tolerance: float) -> bool:
    if isinstance(whole, (str, bytes, bytearray)):
        return member in whole
    return any(equal(member, item, tolerance) for item in whole)


def tolerant(tree: Any) -> Any:
    """Return ``tree`` with comparisons that call :func:`tolerant_names`."""
    return _Tolerant().visit(tree)


def tolerant_names(tolerance: float) -> dict[str, Any]:
    return {
        "_equal": functools.partial(equal, tolerance=tolerance),
        "_within": functools.partial(within, tolerance=tolerance),
    }


class _Tolerant(ast.NodeTransformer):
    _FUNCTIONS = {ast.Eq: "_equal", ast.NotEq: "_equal", ast.In: "_within", ast.NotIn: "_within"}  # noqa: RUF012

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        parts = [self._pair(op, *sides[i : i + 2]) for i, op in enumerate(node.ops)]
        return parts[0] if len(parts) == 1 else ast.BoolOp(ast.And(), parts)

    def _pair(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> ast.expr:
        if type(op) not in self._FUNCTIONS:
            return ast.Compare(left, [op], [right])
        call = ast.Call(ast.Name(self._FUNCTIONS[type(op)], ast.Load()), [left, right], [])
        return ast.UnaryOp(ast.Not(), call) if isinstance(op, (ast.NotEq, ast.NotIn)) else call
