"""Select the assert expressions that a clean interpreter, in which no program ran, may evaluate.

It is sandboxed too, so these rules concern meaning: no undefined names, types or representations of results (subclasses
have become plain data), randomness or time.
"""

import ast
import builtins

from penstock.services.reward.executor.inside import runner

_BUILTINS = frozenset(
    """
abs all any bin bool bytearray bytes chr complex dict divmod enumerate filter float format frozenset hex int isinstance iter len list map
max min next oct ord pow range reversed round set slice sorted str sum tuple zip
""".split()  # noqa: SIM905
)
_OF_WHOLE_VALUES = frozenset(("repr", "ascii"))
"""Allowed only without results."""
_UNCERTAIN_MODULES = frozenset(("random", "time", "sys"))
_UNCERTAIN = frozenset(("now", "today", "utcnow", "random"))
NUMPY = frozenset(("np", "numpy"))
PRELUDE = frozenset(runner.prelude()) | NUMPY
BUILTINS = frozenset(dir(builtins))
LIBRARY_TYPES = frozenset(name for name in PRELUDE if name[0].isupper()) | {"deque", "defaultdict", "namedtuple"}
_INSTANCES = frozenset(
    "bool bytes complex Decimal dict float Fraction frozenset int list set str tuple".split()  # noqa: SIM905
)
METHODS = frozenset(
    name
    for kind in (str, bytes, list, tuple, dict, set, frozenset, int, float, complex, range)
    for name in dir(kind)
    if name[0] != "_"
) | frozenset(
    """
year month day hour minute second microsecond days seconds microseconds total_seconds isoformat strftime weekday date time most_common
elements subtract popleft appendleft rotate quantize numerator denominator limit_denominator all any shape tolist
""".split()  # noqa: SIM905
)


class Unsupported(Exception):
    """The expression uses an unsupported feature, named in the message."""


def check(node: ast.expr, results: frozenset[str]) -> None:
    """Raise Unsupported unless ``node`` keeps its meaning in a clean interpreter."""
    bound = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    bound |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    known = frozenset(bound) | results | _BUILTINS | (PRELUDE - _UNCERTAIN_MODULES)
    if not any(isinstance(part, ast.Name) and part.id in results for part in ast.walk(node)):
        known |= _OF_WHOLE_VALUES
    for part in ast.walk(node):
        _check_part(part, known)


def _check_part(part: ast.AST, known: frozenset[str]) -> None:
    match part:
        case ast.Name(id=name) if name not in known:
            raise Unsupported(
                f"the name {name!r}, which the row does not define, or which has no meaning outside of the program"
            )
        case ast.Attribute(attr=name) if name.startswith("_") or name in _UNCERTAIN:
            raise Unsupported(f"the attribute {name!r}")
        case ast.Attribute(attr=name) if not _is_library(part) and name not in METHODS:
            raise Unsupported(f"the attribute {name!r} of a result, which is plain data")
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
            if not {name.id for name in ast.walk(kinds) if isinstance(name, ast.Name)} <= _INSTANCES:
                raise Unsupported(f"isinstance() but with types of {', '.join(sorted(_INSTANCES))}")
        case ast.Await() | ast.Yield() | ast.YieldFrom() | ast.NamedExpr():
            raise Unsupported(f"{ast.unparse(part)!r}")


def _is_library(node: ast.AST) -> bool:
    """Whether ``node`` is an attribute of a prelude name (``datetime.datetime.strptime``)."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in PRELUDE


def uses_numpy(node: ast.AST) -> bool:
    """Whether evaluation needs numpy."""
    return any(isinstance(part, ast.Name) and part.id in NUMPY for part in ast.walk(node))
