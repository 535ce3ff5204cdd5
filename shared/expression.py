"""The run's reward expression over the values of a sample's scorers.

::

    0.9 * answer + 0.1 * format if format > 0 else 0

    expression = expression "if" expression "else" expression
               | "and", "or", "not", comparison, + - * /, min(…), max(…)      as in Python
               | applies(scorer) | first(scorer, scorer, …)
               | the name of a scorer | a number

Scorers that a problem does not name (``data.scorers_field``) have no value, and a group that needs one is buried.
``applies`` is 1 if a scorer applies, else 0; ``first`` is the value of the first that does. Anything else is refused when
it is read; what is left can neither name an object of Python nor take long.
"""

import ast
import math
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from penstock.shared.errors import PermanentError, SettingsError

LONGEST = 1_000
DEEPEST = 100
_LARGEST_REWARD = 3.4e38  # of a float32
_COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


class Expression:
    """A checked reward expression over the values of ``scorers``; empty text is their mean.

    >>> Expression("0.9 * answer + 0.1 * format if format > 0 else 0", ["answer", "format"])({"answer": 1, "format": 0.5})
    0.9500000000000001

    Raises:
        SettingsError: it is invalid, or names an unknown scorer.
    """

    def __init__(self, text: str, scorers: Sequence[str]) -> None:
        self.text = " ".join(text.split())
        self._code = _compiled(self.text, scorers, "reward.expression") if self.text else None

    def __call__(self, values: Mapping[str, float]) -> float:
        """Raises PermanentError: not finite, or a scorer does not apply."""
        try:
            reward = float(sum(values.values()) / len(values) if self._code is None else _evaluated(self._code, values))
        except KeyError as error:
            raise PermanentError(
                f"expected scorer {error.args[0]!r} to apply, as {self.text!r} needs its value, found {', '.join(values)}: "
                f"change the column data.scorers_field, or guard it in reward.expression (… if applies({error.args[0]}) else …)"
            ) from error
        except ArithmeticError as error:
            raise self._not_finite(values, str(error)) from error
        if not abs(reward) <= _LARGEST_REWARD:
            raise self._not_finite(values, str(reward))
        return reward

    def _not_finite(self, values: Mapping[str, float], outcome: str) -> PermanentError:
        return PermanentError(
            f"expected a finite reward from {self.text or 'the mean'!r} with {dict(values)}, found {outcome}: change reward.expression"
        )


class Condition:
    """A checked condition over named values, which may be texts.

    >>> Condition('level <= 3 and source != "web"', "data.filter")({"level": 2, "source": "book"})
    True

    Args:
        setting: named by errors.

    Raises:
        SettingsError: it is invalid.
    """

    def __init__(self, text: str, setting: str) -> None:
        self._code = _compiled(" ".join(text.split()), None, setting)

    def __call__(self, values: Mapping[str, float | str]) -> bool:
        """Raises KeyError: a name has no value; TypeError, ArithmeticError: the values do not fit the operations."""
        return bool(_evaluated(self._code, values))


def _evaluated(code: CodeType, values: Mapping[str, Any]) -> Any:
    known = {"__builtins__": {}, "min": min, "max": max, "first": _first, "values": values}
    return eval(code, known)  # noqa: S307 (of the nodes that _Checker lets pass)


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return values[next((name for name in names if name in values), names[0])]


def _compiled(text: str, scorers: Sequence[str] | None, setting: str) -> CodeType:
    """Return the code of a checked expression. ``scorers``: the known names; None: any name, and texts."""
    checker = _Checker(text, scorers, setting)
    if len(text) > LONGEST:
        raise checker.refused(f"at most {LONGEST} characters", f"{len(text)}", 0)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise checker.refused("an expression", error.msg, (error.offset or len(text) + 1) - 1) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise checker.refused("an expression", str(error) or "one that is nested too deeply", 0) from error
    checked = ast.Expression(checker.visit(tree.body))
    return compile(ast.fix_missing_locations(checked), setting, "eval")


class _Checker(ast.NodeTransformer):
    """Refuses all but the grammar; names become ``values["name"]``, numbers floats."""

    def __init__(self, text: str, scorers: Sequence[str] | None, setting: str) -> None:
        self._text, self._scorers, self._setting = text, scorers, setting
        self._depth = 0

    def visit(self, node: ast.AST) -> Any:
        """Return what replaces ``node``."""
        if not isinstance(node, ast.expr):  # operators
            return node
        if self._depth > DEEPEST:
            raise self.refused(f"an expression nested at most {DEEPEST} deep", "more", node.col_offset)
        self._depth += 1
        replaced = self._replaced(node)
        self._depth -= 1
        return replaced

    def _replaced(self, node: ast.expr) -> ast.AST:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return ast.Constant(self._number(value, node))
            case ast.Constant(value=str()) if self._scorers is None:
                return node
            case ast.Name():
                return ast.Subscript(_VALUES, self._named(node), ast.Load())
            case (
                ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not())
                | ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div())
                | ast.BoolOp()
                | ast.IfExp()
            ):
                return self.generic_visit(node)
            case ast.Compare(ops=operators, comparators=operands):
                for comparison, operand in zip(operators, operands, strict=True):
                    if not isinstance(comparison, _COMPARISONS):
                        raise self.refused("a comparison of numbers (< <= > >= == !=)", "another", operand.col_offset)
                return self.generic_visit(node)
            case ast.Call(func=ast.Name(id="applies"), args=[scorer], keywords=[]):
                return ast.Compare(self._named(scorer), [ast.In()], [_VALUES])
            case ast.Call(func=ast.Name(id="first") as first, args=[_, _, *_] as scorers, keywords=[]):
                return ast.Call(first, [_VALUES, *map(self._named, scorers)], [])
            case ast.Call(func=ast.Name(id="min" | "max") as choose, args=[_, _, *_] as operands, keywords=[]):
                return ast.Call(choose, [self.visit(operand) for operand in operands], [])
        names = "names, numbers, texts" if self._scorers is None else "names of scorers, numbers"
        raise self.refused(
            f"{names}, + - * /, comparisons, and, or, not, if-else, min(a, b), max(a, b), applies(a) and first(a, b)",
            repr(ast.get_source_segment(self._text, node))[:80],
            node.col_offset,
        )

    def _number(self, value: float, node: ast.expr) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.refused("finite numbers", "one that is not", node.col_offset)
        return number

    def _named(self, node: ast.expr) -> ast.Constant:
        name = node.id if isinstance(node, ast.Name) else None
        if name is None or (self._scorers is not None and name not in self._scorers):
            known = f" ({', '.join(self._scorers)})" if self._scorers else ""
            shown = repr(ast.get_source_segment(self._text, node) if name is None else name)[:80]
            raise self.refused(f"the name of a scorer{known}", shown, node.col_offset)
        return ast.Constant(name)

    def refused(self, expected: str, actual: str, offset: int) -> SettingsError:
        return SettingsError(
            f"expected {expected} in {self._setting}, found {actual} at character {offset + 1} "
            f"of {self._text[:120]!r}: change {self._setting}"
        )


_VALUES = ast.Name("values", ast.Load())
