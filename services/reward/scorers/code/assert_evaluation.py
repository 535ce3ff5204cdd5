"""Evaluate an assert's check in process: a small subset of Python on small plain data.

No attributes, no imports, and only the functions in :data:`FUNCTIONS`. A value that could grow large raises
:class:`plain.Elsewhere`, and a killable clean interpreter evaluates the check.
"""

import ast
import copy
import functools
import math
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

from penstock.services.reward.executor.inside import comparison
from penstock.services.reward.scorers.code.program_results import Elsewhere, Plain

_LARGEST_BITS = 100_000
_LONGEST = 10_000
TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, set, frozenset, dict)}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
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
    match node:
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _MATHEMATICS:
            return name
        case ast.Name(id=name) if name in FUNCTIONS or name == "isinstance":
            return name
    return None


def check(node: ast.expr, names: frozenset[str]) -> None:
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


def evaluate(node: ast.expr, names: Mapping[str, Plain], tolerance: float) -> Plain:
    """Return the value of a checked expression over ``names``. Raises what Python would, or Elsewhere over a bound."""
    node = copy.deepcopy(node)
    node = _Bounded().visit(comparison.tolerant(node) if tolerance > 0 else node)
    code = compile(ast.fix_missing_locations(ast.Expression(node)), "assert", "eval")
    return eval(code, {**_NAMES, **comparison.tolerant_names(tolerance), **names})  # only what check() lets through


class _Bounded(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Replace an operator by a call that bounds its result."""
        self.generic_visit(node)
        function = ast.Name(f"_{type(node.op).__name__}", ast.Load())
        return ast.Call(function, [node.left, node.right], [])


def _binary(op: type[ast.operator], left: Plain, right: Plain) -> Plain:
    if op is ast.Add and type(left) is type(right) and isinstance(left, (str, list, tuple)):
        return left + right
    if op is ast.Sub and isinstance(left, (set, frozenset)):
        return left - right
    if op is ast.Mult and isinstance(left, (str, list, tuple)) and isinstance(right, int):
        if len(left) * right > _LONGEST:
            raise Elsewhere("a long product")
        return left * right
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        raise Elsewhere("operands that are not numbers")
    return _arithmetic(op, left, right)


def _arithmetic(op: type[ast.operator], left: float, right: float) -> Plain:
    bits = [abs(side).bit_length() for side in (left, right) if isinstance(side, int)]
    if op is ast.Pow and len(bits) == 2 and bits[0] * abs(right) > _LARGEST_BITS:
        raise Elsewhere("a large number")
    if op is not ast.Pow and sum(bits) > _LARGEST_BITS:
        raise OverflowError("too large")
    return _OPERATORS[op](left, right)


_NAMES: dict[str, object] = {
    "__builtins__": {},
    "isinstance": isinstance,
    "math": types.SimpleNamespace(**_MATHEMATICS),
    **FUNCTIONS,
    **{f"_{op.__name__}": functools.partial(_binary, op) for op in _OPERATORS},
}
