"""Split an assert in two: the calls of the candidate's functions, which run inside, and the check, which does not.

::

    assert f((1, 2)) == (2, 1), "…"
           ╰───┬───╯ ╰───┬───╯
               │         the check, evaluated out here on what the call returned: call_0 == (2, 1)
               a function without arguments, added to the program: def penstock_call_0(): return penstock_plain(f((1, 2)))

A call's arguments go inside, and nothing else of the assert does. So a call that is given another call's result *beside*
other data is refused (``check(f(1), 5)`` would carry the 5 inside), and so is a method of a result. What the program makes
of ``penstock_plain`` changes nothing: whatever it does, all that it can do is return data.

Asserts are written by whoever made the dataset. They are parsed here; a completion never is.
"""

import ast
import dataclasses

from services.reward.code import evaluation
from services.reward.code.evaluation import Refused

INSIDE = """

def penstock_plain(value):
    if type(value) in (tuple, set, frozenset):
        return {"tuple" if type(value) is tuple else "set": [penstock_plain(item) for item in value]}
    if type(value) is dict:
        return {"dict": [[penstock_plain(key), penstock_plain(item)] for key, item in value.items()]}
    return [penstock_plain(item) for item in value] if type(value) is list else value
"""
"""Tags what JSON cannot tell apart (:func:`services.reward.code.plain.untagged`); what is not plain the executor refuses."""
SUPPORTED = (
    "calls of the program's functions, literals, comparison, arithmetic, and/or/not, indexing, isinstance, math.isclose, "
    + ", ".join(sorted(evaluation.FUNCTIONS))
)


@dataclasses.dataclass(frozen=True, slots=True)
class SplitAssert:
    """One assert in two."""

    source: str
    calls: tuple[str, ...]
    """Python source of each call; what the i-th returned is named ``call_i`` in the check."""
    check: ast.expr

    @property
    def inside(self) -> str:
        """What is added to the program."""
        made = (f"def penstock_{name(i)}():\n    return penstock_plain({call})\n" for i, call in enumerate(self.calls))
        return INSIDE + "".join(made)


def name(place: int) -> str:
    """Return the name of the call at ``place``."""
    return f"call_{place}"


def split(text: str) -> list[SplitAssert]:
    """Return the asserts of ``text``, which holds nothing else.

    Raises:
        Refused: it is no Python, holds another statement, or an assert that cannot be split; the message says which.
    """
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"text that is no Python ({error})") from error
    others = [statement for statement in statements if not isinstance(statement, ast.Assert)]
    if others or not statements:
        raise Refused(f"{ast.unparse(others[0])[:80]!r}, which is no assert" if others else "no assert")
    return [_split(statement) for statement in statements if isinstance(statement, ast.Assert)]


def _split(statement: ast.Assert) -> SplitAssert:
    source = ast.unparse(ast.Assert(test=statement.test, msg=None))
    calls = _Calls()
    check: ast.expr = calls.visit(statement.test)
    if not calls.found:
        raise Refused(f"{source[:120]!r}, which calls no function of the program")
    try:
        evaluation.check(check, frozenset(name(place) for place in range(len(calls.found))))
    except Refused as error:
        raise Refused(f"{source[:120]!r} with {error}") from error
    return SplitAssert(source, tuple(calls.found), check)


class _Calls(ast.NodeTransformer):
    """Take the outermost calls that are not functions of ours out of an expression, and leave names in their places."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if evaluation.function_name(node.func) is not None:
            node.args = [self.visit(part) for part in node.args]
            for keyword in node.keywords:
                keyword.value = self.visit(keyword.value)
            return node
        _check_inside(node)
        self.found.append(ast.unparse(node))
        return ast.Name(id=name(len(self.found) - 1), ctx=ast.Load())


def _check_inside(call: ast.Call) -> None:
    """Refuse a call that could carry an expected value inside, or that is more than a call."""
    source = ast.unparse(call)
    if not _is_function(call.func):
        raise Refused(f"{source[:120]!r}, a method of a result")
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if len(arguments) == 1 and isinstance(arguments[0], ast.Call) and not _makes(arguments[0]):
        _check_inside(arguments[0])  # f(g(1)): there is nothing beside the result
        return
    for part in (part for argument in arguments for part in ast.walk(argument)):
        if isinstance(part, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            raise Refused(f"{ast.unparse(part)!r}")
        if isinstance(part, ast.Call) and not _makes(part):
            raise Refused(f"{source[:120]!r}, which is given a result beside data that may be the expected value")


def _is_function(node: ast.expr) -> bool:
    """Whether it is ``f``, ``module.f`` or ``Solution().f``."""
    if isinstance(node, ast.Attribute):
        return _is_function(node.value) or (isinstance(node.value, ast.Call) and _makes(node.value))
    return isinstance(node, ast.Name)


def _makes(call: ast.Call) -> bool:
    """Whether it makes an object (``Node(1)``, ``float("inf")``), rather than asking the program for a result."""
    plain = evaluation.function_name(call.func) is not None
    return plain or (isinstance(call.func, ast.Name) and call.func.id[:1].isupper())
