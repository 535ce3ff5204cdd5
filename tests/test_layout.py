"""The layout explains itself: small packages, each with a docstring, and tests in the same tree."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_MODULES = 12
NOT_MIRRORED = {"chaos", "deploy", "support"}
"""Tests of whole runs, of the chart and images, and the tests' own tools."""


def packages(top: str) -> list[Path]:
    return sorted(path.parent for path in (ROOT / top).rglob("__init__.py"))


def test_no_package_has_more_modules_than_a_reader_keeps_in_mind() -> None:
    sizes = {
        str(package.relative_to(ROOT)): sum(path.name != "__init__.py" for path in package.glob("*.py"))
        for top in ("services", "shared", "penstock")
        for package in packages(top)
    }
    assert len(sizes) > 50
    assert {package: size for package, size in sizes.items() if size > MOST_MODULES} == {}


def test_every_package_says_what_it_is() -> None:
    silent = [
        str(package.relative_to(ROOT))
        for top in ("services", "shared", "penstock")
        for package in packages(top)
        if not ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_the_tests_of_a_package_lie_where_it_lies() -> None:
    folders = [package.relative_to(ROOT / "tests") for package in packages("tests")]
    assert len(folders) > 20
    tested = [folder for folder in folders if folder.parts and folder.parts[0] not in NOT_MIRRORED]
    homes = {folder: [ROOT / folder, ROOT / "services" / folder] for folder in tested}
    assert [str(folder) for folder, places in homes.items() if not any(place.is_dir() for place in places)] == []


def test_a_package_s_source_may_warn_when_it_is_compiled_and_ours_may_not() -> None:
    for source in ("'' is ''", "'\\d'"):
        compile(source, "/anywhere/lib/python3/site-packages/package/module.py", "exec")
        with pytest.raises(SyntaxError):
            compile(source, str(ROOT / "tests" / "module.py"), "exec")
