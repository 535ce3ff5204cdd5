"""The run's reward expression over the values of a sample's scorers.

::

    0.9 * answer + 0.1 * format if format > 0 else 0

    expression = expression "if" expression "else" expression
               | "and", "or", "not", comparison, + - * /, min(…), max(…)      as in Python
               | applies(scorer) | first(scorer, scorer, …)
               | the name of a scorer | a number

Scorers that a problem does not name (``data.scorers_field``) have no value, and a group that needs one is buried.
``applies`` is 1 if a scorer applies, else 0; ``first`` is the value of the first that does. It is parsed once into a
checked tree, never evaluated as Python.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

from penstock.shared.errors import PermanentError, SettingsError

Values: TypeAlias = Mapping[str, float]
Formula: TypeAlias = Callable[[Values], float]

LONGEST = 1_000
DEEPEST = 100
_LARGEST_REWARD = 3.4e38  # of a float32
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max}


class Expression:
    """A checked reward expression over the values of ``scorers``; empty text is their mean.

    >>> Expression("0.9 * answer + 0.1 * format if format > 0 else 0", ["answer", "format"])({"answer": 1, "format": 0.5})
    0.9500000000000001

    Raises:
        SettingsError: it is invalid, or names an unknown scorer.
    """

    def __init__(self, text: str, scorers: Sequence[str]) -> None:
        self.text = " ".join(text.split())
        self._evaluate = _Compiler(self.text, scorers).compile() if self.text else _mean

    def __call__(self, values: Values) -> float:
        """Raises PermanentError: not finite, or a scorer does not apply."""
        try:
            reward = float(self._evaluate(values))
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

    def _not_finite(self, values: Values, outcome: str) -> PermanentError:
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
        self.text = " ".join(text.split())
        self._evaluate = _Compiler(self.text, None, setting).compile()

    def __call__(self, values: Mapping[str, float | str]) -> bool:
        """Raises KeyError: a name has no value; TypeError, ArithmeticError: the values do not fit the operations."""
        return bool(self._evaluate(cast(Values, values)))


def _mean(values: Values) -> float:
    return sum(values.values()) / len(values)


class _Compiler:
    """``scorers``: the known names; None: any name, and texts."""

    def __init__(self, text: str, scorers: Sequence[str] | None, setting: str = "reward.expression") -> None:
        self._text = text
        self._scorers = None if scorers is None else frozenset(scorers)
        self._known = ", ".join(scorers or ())
        self._setting = setting

    def compile(self) -> Formula:
        if len(self._text) > LONGEST:
            raise self._refused(f"at most {LONGEST} characters", f"{len(self._text)}", 0)
        try:
            tree = ast.parse(self._text, mode="eval")
        except SyntaxError as error:
            raise self._refused("an expression", error.msg, (error.offset or len(self._text) + 1) - 1) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._refused("an expression", str(error) or "one that is nested too deeply", 0) from error
        return self._node(tree.body, 0)

    def _node(self, node: ast.expr, depth: int) -> Formula:
        if depth > DEEPEST:
            raise self._refused(f"an expression nested at most {DEEPEST} deep", "more", node.col_offset)
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._constant(value, node)
            case ast.Constant(value=str() as text) if self._scorers is None:
                return cast(Formula, lambda values: text)
            case ast.Name(id=name):
                return self._scorer(name, node)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not() as sign, operand=operand):
                return _unary(sign, self._node(operand, depth + 1))
            case ast.BinOp(op=operation) if type(operation) in _BINARY:
                return _binary(
                    _BINARY[type(operation)], self._node(node.left, depth + 1), self._node(node.right, depth + 1)
                )
            case ast.BoolOp(op=word, values=operands):
                return _boolean(isinstance(word, ast.And), [self._node(operand, depth + 1) for operand in operands])
            case ast.Compare(left=left, ops=operators, comparators=rest):
                return self._comparison([left, *rest], operators, depth)
            case ast.IfExp(test=test, body=body, orelse=other):
                return _conditional(*(self._node(part, depth + 1) for part in (test, body, other)))
            case ast.Call(func=ast.Name(id="applies"), args=[ast.Name(id=name) as scorer], keywords=[]):
                return _applies(self._named(name, scorer))
            case ast.Call(func=ast.Name(id="first"), args=[_, _, *_], keywords=[]):
                return self._first(node.args)
            case ast.Call(func=ast.Name(id=name), args=[_, _, *_], keywords=[]) if name in _FUNCTIONS:
                return _function(_FUNCTIONS[name], [self._node(argument, depth + 1) for argument in node.args])
            case _:
                raise self._refused_part(node)

    def _refused_part(self, node: ast.expr) -> SettingsError:
        names = "names of scorers, numbers" if self._scorers is not None else "names, numbers, texts"
        return self._refused(
            f"{names}, + - * /, comparisons, and, or, not, if-else, min(a, b), max(a, b), applies(a) and first(a, b)",
            repr(ast.get_source_segment(self._text, node))[:80],
            node.col_offset,
        )

    def _constant(self, value: float, node: ast.expr) -> Formula:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._refused("finite numbers", "one that is not", node.col_offset)
        return lambda values: number

    def _scorer(self, name: str, node: ast.expr) -> Formula:
        return operator.itemgetter(self._named(name, node))

    def _first(self, nodes: Sequence[ast.expr]) -> Formula:
        for node in nodes:
            if not isinstance(node, ast.Name):
                raise self._refused("names of scorers in first(…)", "something else", node.col_offset)
        names = [self._named(node.id, node) for node in nodes if isinstance(node, ast.Name)]
        return lambda values: values[next((name for name in names if name in values), names[0])]

    def _named(self, name: str, node: ast.expr) -> str:
        if self._scorers is not None and name not in self._scorers:
            raise self._refused(f"the name of a scorer ({self._known})", repr(name), node.col_offset)
        return name

    def _comparison(self, nodes: list[ast.expr], operators: list[ast.cmpop], depth: int) -> Formula:
        operands = [self._node(node, depth + 1) for node in nodes]
        for comparison, node in zip(operators, nodes[1:], strict=True):
            if type(comparison) not in _COMPARISONS:
                raise self._refused("a comparison of numbers (< <= > >= == !=)", "another", node.col_offset)
        holds = [_COMPARISONS[type(comparison)] for comparison in operators]

        def evaluate(values: Values) -> float:
            left = operands[0](values)
            for compare, operand in zip(holds, operands[1:], strict=True):
                right = operand(values)
                if not compare(left, right):
                    return 0.0
                left = right
            return 1.0

        return evaluate

    def _refused(self, expected: str, actual: str, offset: int) -> SettingsError:
        return SettingsError(
            f"expected {expected} in {self._setting}, found {actual} at character {offset + 1} "
            f"of {self._text[:120]!r}: change {self._setting}"
        )


def _applies(scorer: str) -> Formula:
    return lambda values: float(scorer in values)


def _unary(sign: ast.unaryop, operand: Formula) -> Formula:
    if isinstance(sign, ast.Not):
        return lambda values: float(not operand(values))
    if isinstance(sign, ast.USub):
        return lambda values: -operand(values)
    return operand


def _binary(combine: Callable[[float, float], float], left: Formula, right: Formula) -> Formula:
    return lambda values: combine(left(values), right(values))


def _boolean(every: bool, operands: list[Formula]) -> Formula:
    def evaluate(values: Values) -> float:
        value = 0.0
        for operand in operands:
            value = operand(values)
            if bool(value) is not every:
                break
        return value

    return evaluate


def _conditional(test: Formula, body: Formula, other: Formula) -> Formula:
    return lambda values: body(values) if test(values) else other(values)


def _function(choose: Callable[[list[float]], float], arguments: list[Formula]) -> Formula:
    return lambda values: choose([argument(values) for argument in arguments])
