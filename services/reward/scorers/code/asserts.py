"""Split an assert into calls of the function under test, which run in the sandbox, and a check, which does not.

::

    assert f((1, 2)) == Decimal("1.5"), "…"
           ╰───┬───╯    ╰─────┬─────╯
               │              given_0: evaluated once, in a clean interpreter
               call_0: evaluated inside                              the check: call_0 == given_0, evaluated outside: two
                                                                     values here, others in a clean interpreter

Only a call's arguments enter the sandbox, and only the function that every assert calls, or that the row names, is the
program's, so no expected value reaches it.
"""

import ast
import dataclasses
from collections.abc import Sequence
from typing import cast

from penstock.services.reward.scorers.code import clean_interpreter
from penstock.services.reward.scorers.code.clean_interpreter import Unsupported

SUPPORTED = (
    "calls of one function of the program, compared with literals and with what the builtins and the standard library make of them and of "
    "the results"
)
_NEVER_THE_PROGRAMS = clean_interpreter.BUILTINS | clean_interpreter.LIBRARY_TYPES


@dataclasses.dataclass(frozen=True, slots=True)
class SplitAssert:
    source: str
    function: str
    """``Solution.f`` for a method of an object created by the assert."""
    calls: tuple[str, ...]
    """Python source of each call, named ``call_i`` in the check."""
    given: tuple[str, ...]
    """Python source of complex parts without a result, named ``given_i`` in the check."""
    check: ast.expr
    is_equation: bool
    """Whether the check compares two of results, given parts and literals by ``==``."""

    @property
    def uses_numpy(self) -> bool:
        return clean_interpreter.uses_numpy(self.check)


def call_name(place: int) -> str:
    return f"call_{place}"


def given_name(place: int) -> str:
    return f"given_{place}"


def split(texts: Sequence[str], function: str = "") -> list[SplitAssert]:
    """Split the asserts of a row. Raises Unsupported: not Python, another statement, or an assert that cannot be split."""
    statements = [statement for text in texts for statement in _parsed(text)]
    function = function or _under_test(statements)
    return [_split(statement, function) for statement in statements]


def _parsed(text: str) -> list[ast.Assert]:
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unsupported(f"text that is no Python ({error})") from error
    asserts = [statement for statement in statements if isinstance(statement, ast.Assert)]
    others = [statement for statement in statements if not isinstance(statement, ast.Assert)]
    if others or not asserts:
        raise Unsupported(f"{ast.unparse(others[0])[:80]!r}, which is no assert" if others else "no assert")
    return asserts


def _shown(statement: ast.Assert) -> str:
    return ast.unparse(ast.Assert(test=statement.test, msg=None))


def _under_test(statements: Sequence[ast.Assert]) -> str:
    called = [_outermost(statement.test) for statement in statements]
    for statement, names in zip(statements, called, strict=True):
        if not names:
            raise Unsupported(f"{_shown(statement)[:120]!r}, which calls no function of the program")
    names = set.intersection(*called)
    if len(names) > 1:
        names = {name for name in names if name not in clean_interpreter.PRELUDE} or names
    if len(names) > 1:
        names = {name for name in names if not name[0].isupper()} or names
    if len(names) != 1:
        seen = ", ".join(sorted(set().union(*called))[:5])
        raise Unsupported(
            f"asserts of which any of {seen} may be the function under test: name it as fn_name, with the asserts as asserts"
        )
    return names.pop()


def _outermost(node: ast.AST) -> set[str]:
    name = _function(node.func) if isinstance(node, ast.Call) else ""
    if name and name.partition(".")[0] not in _NEVER_THE_PROGRAMS:
        return {name}
    return set().union(*(_outermost(child) for child in ast.iter_child_nodes(node)))


def _function(node: ast.expr) -> str:
    """Return ``f`` for ``f``, ``Solution.f`` for ``Solution().f`` and ``Solution.f``, otherwise ""."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=name) | ast.Call(func=ast.Name(id=name)), attr=method):
            is_method = name[:1].isupper() and name not in _NEVER_THE_PROGRAMS and not method.startswith("_")
            return (
                f"{name}.{method}"
                if is_method and (name == "Solution" or method not in clean_interpreter.METHODS)
                else ""
            )
    return ""


def _split(statement: ast.Assert, function: str) -> SplitAssert:
    source = _shown(statement)
    calls = _Calls(function)
    given = _Given()
    try:
        check: ast.expr = calls.visit(statement.test)
        if not calls.sources:
            raise Unsupported(f"no call of the function under test, {function}")
        check = cast(ast.expr, given.visit(check))
        results = frozenset(map(call_name, range(len(calls.sources))))
        names = results | frozenset(map(given_name, range(len(given.sources))))
        clean_interpreter.check(check, names)
    except Unsupported as error:
        raise Unsupported(f"{source[:120]!r} with {error}") from error
    return SplitAssert(source, function, tuple(calls.sources), tuple(given.sources), check, _is_equation(check, names))


def _is_equation(node: ast.expr, names: frozenset[str]) -> bool:
    match node:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return all(_is_literal(side) or (isinstance(side, ast.Name) and side.id in names) for side in (left, right))
    return False


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


class _Calls(ast.NodeTransformer):
    def __init__(self, function: str) -> None:
        self._function = function
        self.sources: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if _function(node.func) != self._function:
            return cast(ast.expr, self.generic_visit(node))
        _check_inside(node)
        self.sources.append(ast.unparse(node))
        return ast.Name(id=call_name(len(self.sources) - 1), ctx=ast.Load())


class _Given(ast.NodeTransformer):
    _INTO = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.List, ast.Tuple, ast.Set)

    def __init__(self) -> None:
        self.sources: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, ast.expr) or _is_literal(node):
            return node
        if self._is_given(node):
            self.sources.append(ast.unparse(node))
            return ast.Name(id=given_name(len(self.sources) - 1), ctx=ast.Load())
        return self.generic_visit(node) if isinstance(node, self._INTO) else node

    def _is_given(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Name, ast.Attribute, ast.Lambda, ast.Starred)) or clean_interpreter.uses_numpy(node):
            return False
        try:
            clean_interpreter.check(node, frozenset())
        except Unsupported:
            return False
        return True


def _check_inside(call: ast.Call) -> None:
    """Refuse a call that could carry an expected value inside, is more than a call, or uses undefined names."""
    source = ast.unparse(call)
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if len(arguments) == 1 and isinstance(arguments[0], ast.Call) and not _makes(arguments[0]):
        _check_inside(arguments[0])  # f(g(1)): only the result is passed
        return
    parts = [part for argument in arguments for part in ast.walk(argument)]
    called = {id(part.func) for part in parts if isinstance(part, ast.Call)}
    bound = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    bound |= {part.arg for part in parts if isinstance(part, ast.arg)}
    for part in parts:
        if isinstance(part, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            raise Unsupported(f"{ast.unparse(part)!r}")
        if isinstance(part, ast.Call) and not _makes(part):
            raise Unsupported(f"{source[:120]!r}, which is given a result beside data that may be the expected value")
        if isinstance(part, ast.Name) and id(part) not in called and not (part.id in bound or _is_known(part.id)):
            raise Unsupported(f"the name {part.id!r}, which the row does not define")


def _is_known(name: str) -> bool:
    return name in clean_interpreter.BUILTINS or name in clean_interpreter.PRELUDE or name[:1].isupper()


def _makes(call: ast.Call) -> bool:
    function = call.func
    while isinstance(function, ast.Attribute):
        function = function.value
    return not isinstance(function, ast.Name) or _is_known(function.id)
