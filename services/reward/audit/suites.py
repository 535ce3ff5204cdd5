"""Variants of a problem's tests for an audit, from its dataset column (:mod:`penstock.services.reward.scorers.code.suite`)."""

import ast
import json
import random

from penstock.shared.bus.messages import Json

_OTHER = 9173


def read(column: Json) -> Json:
    """Parse a column that is JSON text or asserts, one per line."""
    if not isinstance(column, str):
        return column
    try:
        parsed: Json = json.loads(column)
    except (ValueError, RecursionError):
        return [ast.unparse(statement) for statement in _statements(column)] or [column]
    return parsed


def shuffled(column: Json, generator: random.Random) -> Json:
    if isinstance(column, list):
        return generator.sample(column, len(column))
    if isinstance(column, dict) and _are_columns(column):
        inputs, outputs = column["inputs"], column["outputs"]
        assert isinstance(inputs, list)
        assert isinstance(outputs, list)
        order = generator.sample(range(len(inputs)), len(inputs))
        return {**column, "inputs": [inputs[i] for i in order], "outputs": [outputs[i] for i in order]}
    return column


def mutated(column: Json) -> Json:
    """Return tests that expect wrong values; an empty list if impossible.

    >>> mutated(["assert f(2) == [1, 4]", "assert f(3) != 5"])
    ['assert f(2) == [2, 5]']
    """
    if isinstance(column, dict) and _are_columns(column):
        outputs = column["outputs"]
        assert isinstance(outputs, list)
        return {**column, "outputs": [_other(output) for output in outputs]}
    changed: list[Json] = []
    for row in column if isinstance(column, list) else []:
        if isinstance(row, dict) and "output" in row:
            changed.append({**row, "output": _other(row["output"])})
        elif isinstance(row, str):
            changed += [ast.unparse(statement) for statement in map(_mutate, _statements(row)) if statement is not None]
    return changed


def constant(column: Json) -> bool:
    """Whether all tests expect the same, so that a constant passes."""
    if isinstance(column, dict) and _are_columns(column):
        expected = column["outputs"]
        return isinstance(expected, list) and len({json.dumps(each, sort_keys=True) for each in expected}) == 1
    rows = column if isinstance(column, list) else []
    values: set[str] = set()
    for row in rows:
        if isinstance(row, dict) and "output" in row:
            values.add(json.dumps(row["output"], sort_keys=True))
        elif isinstance(row, str):
            values |= {_expected(statement) for statement in _statements(row)}
    return len(values) == 1 and "" not in values


def _are_columns(column: dict[str, Json]) -> bool:
    inputs, outputs = column.get("inputs"), column.get("outputs")
    return isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _expected(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare) and _is_equality(statement.test):
        return ast.dump(statement.test.comparators[0])
    return ""


def _is_equality(test: ast.Compare) -> bool:
    return len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)


def _mutate(statement: ast.stmt) -> ast.stmt | None:
    if not (isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)):
        return None
    if not _is_equality(statement.test):
        return None
    constants = _Constants()
    right = constants.visit(statement.test.comparators[0])
    if not constants.changed:
        return None
    test = ast.Compare(left=statement.test.left, ops=statement.test.ops, comparators=[right])
    return ast.fix_missing_locations(ast.Assert(test=test, msg=None))


class _Constants(ast.NodeTransformer):
    def __init__(self) -> None:
        self.changed = False

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace a constant by another of its type."""
        value = node.value
        if value is None or isinstance(value, (bool, int, float, str)):
            self.changed = True
            other = _other_constant(value)
            if isinstance(other, (int, float)) and not isinstance(other, bool) and other < 0:
                return ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=-other))
            return ast.Constant(value=other)
        return node


def _other_constant(value: str | float | None) -> str | float:
    if isinstance(value, str):
        return _other_text(value)
    return _OTHER if value is None else (not value) if isinstance(value, bool) else value + 1


def _other_text(text: str) -> str:
    return (
        text[:-1] + str((int(text[-1]) + 1) % 10) if text[-1:].isascii() and text[-1:].isdigit() else f"{text}{_OTHER}"
    )


def _other(value: Json) -> Json:
    if isinstance(value, list):
        return [*value, _other(value[-1]) if value else _OTHER]
    if isinstance(value, dict):
        return {**value, "penstock": _OTHER}
    return _other_constant(value)
