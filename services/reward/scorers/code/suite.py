r"""Read a problem's tests from a dataset column, in the shapes of docs/rewards.md, "The tests"."""

import ast
import json
from collections.abc import Iterator
from decimal import Decimal

from penstock.services.reward.scorers.code import asserts
from penstock.services.reward.scorers.code.clean_interpreter import Unsupported
from penstock.services.reward.scorers.code.tests import AssertTest, CallTest, ProgramTest, Test
from penstock.shared.bus.messages import Json

SHAPES = '[{input, output}, …], {"inputs": […], "outputs": […], "fn_name": …}, ["assert …", …] or {"asserts": […], "fn_name": …}'
_CHECK = "def check("


class BadTests(Exception):
    """No tests can be read."""


def read_tests(column: Json, entry_point: Json = None) -> tuple[Test, ...]:
    """Read the column. ``entry_point``: the function that HumanEval's ``check`` is called with. Raises BadTests."""
    if isinstance(column, str):
        is_check = entry_point is not None and column.lstrip()[:1] not in ("[", "{") and _CHECK in column
        column = _checked(column, _name(entry_point)) if is_check else _parsed(column)
    if isinstance(column, dict) and {"inputs", "outputs"} <= column.keys():
        tests = list(_columns(column["inputs"], column["outputs"], column.get("fn_name")))
    elif isinstance(column, dict) and "asserts" in column:
        tests = _asserts(column["asserts"], column.get("fn_name"))
    elif isinstance(column, list):
        tests = _rows(column)
    else:
        raise BadTests(f"expected tests as {SHAPES}, found {_shown(column)}")
    if not tests:
        raise BadTests("expected at least one test, found none")
    return tuple(tests)


def _parsed(text: str) -> Json:
    try:
        value: Json = json.loads(text, parse_int=lambda digits: int(Decimal(digits)))  # of any length
    except (ValueError, RecursionError):
        return [text]
    return value


def _checked(text: str, function: str) -> Json:
    """Return the asserts of ``def check(candidate)``, about ``function``. Raises BadTests: it has other statements."""
    try:
        (check,) = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
        (candidate,) = check.args.args
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTests(f"expected one function check(candidate) in Python, found {text[:80]!r}") from error
    for name in (each for each in ast.walk(check) if isinstance(each, ast.Name)):
        name.id = function if name.id == candidate.arg else name.id
    asserts_only = [
        each for each in check.body if not (isinstance(each, ast.Assert) and ast.unparse(each.test) == "True")
    ]
    return {"asserts": [ast.unparse(each) for each in asserts_only], "fn_name": function}


def _columns(inputs: Json, outputs: Json, function: Json) -> Iterator[Test]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadTests(f"expected as many inputs as outputs, found {_shown(inputs)} and {_shown(outputs)}")
    for given, expected in zip(inputs, outputs, strict=True):
        yield _program(given, expected) if function is None else _call(function, given, expected, wrapped=True)


def _rows(items: list[Json]) -> list[Test]:
    """Read asserts together, since they identify the function under test together."""
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) == len(items) and texts:
        return _asserts(list(texts), None)
    return [test for item in items for test in (_asserts([item], None) if isinstance(item, str) else [_row(item)])]


def _row(item: Json) -> Test:
    if not isinstance(item, dict) or not {"input", "output"} <= item.keys():
        raise BadTests(f"expected a test as {{input, output}} or an assert, found {_shown(item)}")
    function = item.get("fn_name")
    given, expected = item["input"], item["output"]
    return _program(given, expected) if function is None else _call(function, given, expected, wrapped=False)


def _asserts(texts: Json, function: Json) -> list[Test]:
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadTests(f"expected asserts as text, found {_shown(texts)}")
    try:
        splits = asserts.split([str(text) for text in texts], "" if function is None else _name(function))
    except Unsupported as error:
        raise BadTests(f"asserts may be {asserts.SUPPORTED}; this row has {error}") from error
    return [AssertTest(split) for split in splits]


def _program(given: Json, expected: Json) -> ProgramTest:
    return ProgramTest(_text(given, "input"), _text(expected, "output"))


def _text(value: Json, part: str) -> str:
    if isinstance(value, list):
        return "".join(f"{_text(line, part)}\n" for line in value)
    if not isinstance(value, str):
        raise BadTests(f"expected a program's {part} as text, found {_shown(value)}; a function's test has fn_name")
    return value


def _call(function: Json, given: Json, expected: Json, *, wrapped: bool) -> CallTest:
    name = _name(function)
    if not isinstance(given, list):
        raise BadTests(f"expected a list of arguments for {name}, found {_shown(given)}")
    try:
        json.dumps(given)
    except ValueError as error:
        raise BadTests(
            f"expected arguments for {name} without integers of more than 4,300 digits, found one"
        ) from error
    return CallTest(name, tuple(given), expected, wrapped)


def _name(function: Json) -> str:
    if not isinstance(function, str) or not all(part.isidentifier() for part in function.split(".")):
        raise BadTests(f"expected a function's name as fn_name, found {_shown(function)}")
    return function


def _shown(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:80]}…"
