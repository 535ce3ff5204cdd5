"""Size is limited: `tests/budget.toml` has a number for each package, and a change that raises one says what for.

A raise is a line of its own commit, whose body names what the addition replaces or why it earns its lines. Functions,
files and parameters that are over the limit today are listed with their size, and may only shrink.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from penstock.services.cli.__main__ import app

ROOT = Path(__file__).parents[1]
BUDGET: dict[str, Any] = tomllib.loads((ROOT / "tests/budget.toml").read_text(encoding="utf-8"))
MOST_FUNCTION_LINES, MOST_FILE_LINES, MOST_PARAMETERS = 60, 400, 8
PRODUCT = ("services", "shared", "penstock")


@cache
def sources() -> dict[str, str]:
    paths = (path for top in PRODUCT for path in (ROOT / top).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def words(*patterns: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for pattern in patterns for path in ROOT.glob(pattern))


@pytest.mark.parametrize("package", BUDGET["lines"])
def test_a_package_keeps_to_its_lines(package: str) -> None:
    lines = sum(text.count("\n") for name, text in sources().items() if name.startswith(f"{package}/"))
    assert lines <= BUDGET["lines"][package], (
        f"expected at most the lines of tests/budget.toml in {package}: remove some"
    )


def test_every_line_of_the_product_is_counted() -> None:
    assert [name for name in sources() if not name.startswith(tuple(f"{package}/" for package in BUDGET["lines"]))] == [
        "services/__init__.py"
    ]


def test_words_settings_commands_and_dependencies_keep_to_their_numbers() -> None:
    settings = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    counted = {
        "readme_words": words("README.md"),
        "docs_words": words("README.md", "docs/**/*.md"),
        "settings": len(re.findall(r"^\| `", settings, re.MULTILINE)),
        "commands": len(list(commands(get_command(app)))),
        "dependencies": len(project["dependencies"]),
    }
    limits = BUDGET["counts"]
    assert counted.keys() == limits.keys()
    assert {name: number for name, number in counted.items() if number > limits[name]} == {}


def commands(command: Any) -> Iterator[str]:
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner) if hasattr(inner, "commands") else (inner.name,)


def test_functions_files_and_parameters_are_short() -> None:
    over = {name: text.count("\n") for name, text in sources().items() if text.count("\n") > MOST_FILE_LINES}
    for name, text in sources().items():
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                over |= {f"{name}:{function.name}{kind}": size for kind, size in excesses(function)}
    known = BUDGET["over"]
    assert {where: size for where, size in over.items() if size > known.get(where, 0)} == {}
    assert sorted(known.keys() - over.keys()) == [], "these are short now: remove them from tests/budget.toml"


def excesses(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int]]:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    of = function.args
    names = [argument.arg for argument in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    parameters = len([name for name in names if name not in ("self", "cls")])
    if lines > MOST_FUNCTION_LINES:
        yield "", lines
    if parameters > MOST_PARAMETERS:
        yield "()", parameters


def test_no_module_imports_itself_through_others() -> None:
    graph = {module(name): set(imported(text)) for name, text in sources().items()}
    graph = {name: {each for each in edges if each in graph and each != name} for name, edges in graph.items()}
    cyclic = {name for name in graph if name in reachable(name, graph)}
    assert sorted(cyclic - set(BUDGET["circles"])) == []
    assert sorted(set(BUDGET["circles"]) - cyclic) == []


def module(name: str) -> str:
    inner = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return inner if inner.startswith("penstock") else f"penstock.{inner}"


def imported(text: str) -> Iterator[str]:
    """Yield the modules that a module imports, now, later or for types."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(source), names=names):
                yield source
                yield from (f"{source}.{alias.name}" for alias in names)


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(graph[name])
    return seen
