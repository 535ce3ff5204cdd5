"""Evaluate an assert's check in process: a small subset of Python on small plain data.

No attributes, no imports, and only the functions in :data:`FUNCTIONS`. A value that could grow large raises
:class:`plain.Elsewhere`, and a killable clean interpreter evaluates the check.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from services.reward.executor.inside.comparison import equal, within
from services.reward.scorers.code.program_results import Elsewhere, Plain

_LARGEST_BITS = 100_000
_LONGEST = 10_000
TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, set, frozenset, dict)}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_KEYWORDS = {
    "sorted": {"reverse"},
    "round": {"ndigits"},
    "isclose": {"rel_tol", "abs_tol"},
    "min": {"default"},
    "max": {"default"},
}


class Unsupported(Exception):
    """The expression uses an unsupported feature, named in the message."""


def _round(number: float, ndigits: int | None = None) -> float:
    if ndigits is not None and not -1000 <= ndigits <= 1000:
        raise Elsewhere("round")
    return round(number, ndigits)


FUNCTIONS: dict[str, Callable[..., Plain]] = {
    "abs": abs,
    "all": all,
    "any": any,
    "bool": bool,
    "dict": dict,
    "float": float,
    "frozenset": frozenset,
    "int": int,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "round": _round,
    "set": set,
    "sorted": sorted,
    "str": str,
    "sum": sum,
    "tuple": tuple,
}
_MATHEMATICS: dict[str, Callable[..., Plain]] = {
    "isclose": math.isclose,
    "isfinite": math.isfinite,
    "isinf": math.isinf,
    "isnan": math.isnan,
}


def function_name(node: ast.expr) -> str | None:
    """Return the supported function, ``isinstance`` included, that ``node.func`` names, or None."""
    match node:
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _MATHEMATICS:
            return name
        case ast.Name(id=name) if name in FUNCTIONS or name == "isinstance":
            return name
    return None


def check(node: ast.expr, names: frozenset[str]) -> None:
    """Check that :func:`evaluate` supports every part of ``node``. Raises Refused."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return
        case ast.Name(id=name) if name in names:
            return
        case ast.Call(func=func, args=args, keywords=keywords) if (function := function_name(func)) is not None:
            _check_call(function, args, keywords, names)
            return
        case ast.Compare(ops=ops, left=left, comparators=others):
            _check_identity(ops, [left, *others])
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd()) | ast.BoolOp():
            pass
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod() | ast.Pow()):
            pass
        case ast.List() | ast.Tuple() | ast.Set() | ast.Subscript() | ast.Slice():
            pass
        case ast.Dict(keys=keys) if None not in keys:
            pass
        case _:
            raise Unsupported(f"{ast.unparse(node)!r} ({type(node).__name__})")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            check(child, names)


def _check_call(name: str, args: list[ast.expr], keywords: list[ast.keyword], names: frozenset[str]) -> None:
    unknown = [str(keyword.arg) for keyword in keywords if keyword.arg not in _KEYWORDS.get(name, set())]
    if unknown:
        raise Unsupported(f"the argument {unknown[0]!r} of {name}()")
    if name == "sum" and len(args) != 1:
        raise Unsupported("sum() of more than one argument")
    if name == "isinstance":
        if len(args) != 2 or not _type_names(args[1]):
            raise Unsupported(f"isinstance() but with types of {', '.join(sorted(TYPES))}")
        args = args[:1]
    for part in (*args, *(keyword.value for keyword in keywords)):
        check(part, names)


def _check_identity(ops: list[ast.cmpop], sides: list[ast.expr]) -> None:
    for place, op in enumerate(ops):
        pair = sides[place : place + 2]
        single = any(isinstance(side, ast.Constant) and side.value in (None, True, False) for side in pair)
        if isinstance(op, (ast.Is, ast.IsNot)) and not single:
            raise Unsupported("'is' but with None, True or False")


def _type_names(node: ast.expr) -> list[str]:
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    names = [part.id for part in nodes if isinstance(part, ast.Name) and part.id in TYPES]
    return names if len(names) == len(nodes) else []


class AssertEvaluator:
    """Evaluate checked expressions.

    Args:
        names: plain data by name.
        tolerance: of ``==``, ``!=`` and ``in``; 0 for exact.
    """

    def __init__(self, names: Mapping[str, Plain], tolerance: float) -> None:
        self._names = names
        self._tolerance = tolerance

    def __call__(self, node: ast.expr) -> Plain:
        """Return the value of ``node``.

        Raises:
            ArithmeticError, LookupError, TypeError, ValueError, RecursionError: as Python would.
            Elsewhere: over a bound.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._names[name]
            case ast.List(elts=parts):
                return [self(part) for part in parts]
            case ast.Tuple(elts=parts):
                return tuple(self(part) for part in parts)
            case ast.Set(elts=parts):
                return {self(part) for part in parts}
            case ast.Dict(keys=keys, values=values):
                return {self(key): self(value) for key, value in zip(keys, values, strict=True) if key is not None}
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp(op=op, values=parts):
                return self._either(parts) if isinstance(op, ast.Or) else self._both(parts)
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, self(operand))
            case ast.BinOp(op=op, left=left, right=right):
                return _binary(op, self(left), self(right))
            case ast.Subscript(value=value, slice=place):
                return self(value)[self(place)]
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(None if part is None else self(part) for part in (lower, upper, step)))
            case ast.Call():
                return self._call(node)
        raise AssertionError(f"{type(node).__name__} was not checked")

    def _both(self, parts: list[ast.expr]) -> Plain:
        value: Plain = True
        for part in parts:
            value = self(part)
            if not value:
                break
        return value

    def _either(self, parts: list[ast.expr]) -> Plain:
        value: Plain = False
        for part in parts:
            value = self(part)
            if value:
                break
        return value

    def _compare(self, node: ast.Compare) -> bool:
        left = self(node.left)
        for op, other in zip(node.ops, node.comparators, strict=True):
            right = self(other)
            if not self._holds(op, left, right):
                return False
            left = right
        return True

    def _holds(self, op: ast.cmpop, left: Plain, right: Plain) -> bool:
        match op:
            case ast.Eq():
                return equal(left, right, self._tolerance)
            case ast.NotEq():
                return not equal(left, right, self._tolerance)
            case ast.Is():
                return left is right
            case ast.IsNot():
                return left is not right
            case ast.In():
                return within(left, right, self._tolerance)
            case ast.NotIn():
                return not within(left, right, self._tolerance)
        return bool(_ORDER[type(op)](left, right))

    def _unary(self, op: ast.unaryop, value: Plain) -> Plain:
        if isinstance(op, ast.Not):
            return not value
        return -value if isinstance(op, ast.USub) else +value

    def _call(self, node: ast.Call) -> Plain:
        function = function_name(node.func)
        assert function is not None
        if function == "isinstance":
            return isinstance(self(node.args[0]), tuple(TYPES[kind] for kind in _type_names(node.args[1])))
        keywords = {str(keyword.arg): self(keyword.value) for keyword in node.keywords}
        arguments = [self(part) for part in node.args]
        return (FUNCTIONS.get(function) or _MATHEMATICS[function])(*arguments, **keywords)


def _binary(op: ast.operator, left: Plain, right: Plain) -> Plain:
    if isinstance(op, ast.Add) and type(left) is type(right) and isinstance(left, (str, list, tuple)):
        return left + right
    if isinstance(op, ast.Sub) and isinstance(left, (set, frozenset)):
        return left - right
    if isinstance(op, ast.Mult) and isinstance(left, (str, list, tuple)) and isinstance(right, int):
        if len(left) * right > _LONGEST:
            raise Elsewhere("a long product")
        return left * right
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        raise Elsewhere("operands that are not numbers")
    return _arithmetic(op, left, right)


def _arithmetic(op: ast.operator, left: float, right: float) -> Plain:
    bits = [abs(side).bit_length() for side in (left, right) if isinstance(side, int)]
    if isinstance(op, ast.Pow):
        if len(bits) == 2 and bits[0] * abs(right) > _LARGEST_BITS:
            raise Elsewhere("a large number")
        return left**right
    if sum(bits) > _LARGEST_BITS:
        raise OverflowError("too large")
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
    return left % right
