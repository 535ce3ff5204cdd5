"""The wheel has one importable name, does without extras what it can, and the example notebook runs with it."""

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import typer
from nbclient import NotebookClient

from penstock import Run
from penstock.services.cli.__main__ import app
from tests.conftest import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, as `pip install` puts it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("penstock", "services", "shared"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = ["-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", str(folder), str(source)]
    built = subprocess.run([sys.executable, "-m", "pip", "wheel", *words], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_a_wheel_has_the_tree_s_files_byte_by_byte(wheel: Path) -> None:
    assert sorted(path.name.split("-")[0] for path in wheel.iterdir()) == ["penstock", "penstock"]
    (top,) = wheel.glob("*.dist-info/top_level.txt")
    assert top.read_text().split() == ["penstock"]
    shipped = {
        str(path.relative_to(wheel)): path.read_bytes() for path in (wheel / "penstock").rglob("*") if path.is_file()
    }
    listed = subprocess.run(
        ["git", "ls-files", "penstock", "services", "shared"], cwd=ROOT, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.split() if not (ROOT / name).is_symlink()]
    assert shipped == {f"penstock/{name.removeprefix('penstock/')}": (ROOT / name).read_bytes() for name in names}
    assert {"penstock/services/coordinator/api/page/index.html", "penstock/shared/bus/scripts/admit.lua"} <= set(
        shipped
    )


@pytest.mark.parametrize("name", ["services", "shared"])
def test_a_folder_is_not_imported_by_a_second_name(name: str) -> None:
    with pytest.raises(ImportError, match=f"import penstock.{name}"):
        importlib.import_module(name)


WORDS = {
    "data check": ["run.toml"],
    "new": ["new.toml"],
    "push": ["owner/name"],
    "rollback": ["3"],
    "sft": ["run.toml"],
    "up": ["run.toml"],
}
ONLY_EXTRAS = ("chat", "data check", "eval", "export", "push", "sft", "up")


def commands(group: Any, prefix: str = "") -> Iterator[str]:
    """Yield every command of the command line."""
    if not hasattr(group, "commands"):
        yield prefix.strip()
        return
    for name, command in group.commands.items():
        yield from commands(command, f"{prefix} {name}")


def core(folder: Path) -> Path:
    """Return a folder with the packages that a plain `pip install` of the wheel brings, and no others."""
    folder.mkdir()
    waiting, seen = ["penstock"], {"penstock"}
    while waiting:
        needed = [
            re.match(r"[\w.-]+", line)
            for line in importlib.metadata.requires(waiting.pop()) or ()
            if "extra ==" not in line
        ]
        for name in {re.sub(r"[-_.]+", "-", match[0]).lower() for match in needed if match is not None} - seen:
            seen.add(name)
            try:
                installed = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:  # for another platform or Python
                continue
            waiting.append(name)
            for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
                (folder / top).symlink_to(str(installed.locate_file(top)))
    return folder


EACH_IN_A_FORK = """
import json, os, runpy, sys, traceback
from pathlib import Path
import penstock.services.cli.__main__, penstock.services.cli.reports.ended_run  # what most commands import

endings, errors = {}, Path("errors.txt").absolute()
for name, words in json.loads(sys.argv[1]).items():
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for descriptor, file in ((1, os.devnull), (2, errors)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.argv = ["penstock", *words]
            runpy.run_module("penstock", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    endings[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), errors.read_text()
print(json.dumps(endings))
"""
"""Runs ``python -m penstock`` with each command's words; prints by command its exit code and what it wrote to stderr."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_installation_ends_every_command_in_a_sentence(wheel: Path, tmp_path: Path) -> None:
    packages = os.pathsep.join(map(str, (wheel, core(tmp_path / "core"))))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": packages, "HOME": str(tmp_path)}
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    shutil.copytree(ROOT / "examples/arithmetic/policy", tmp_path / "model")
    (tmp_path / "run.toml").write_text('policy.model = "model"\n')
    (tmp_path / "runs" / "old").mkdir(parents=True)
    shutil.copy(tmp_path / "run.toml", tmp_path / "runs" / "old" / "settings.toml")
    (tmp_path / "runs" / "latest").symlink_to("old")
    names = list(commands(typer.main.get_command(app)))
    assert "policies show" in names
    words = {name: [*name.split(), *WORDS.get(name, [])] for name in names}
    command = [sys.executable, "-S", "-c", EACH_IN_A_FORK, json.dumps(words)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    endings = json.loads(ran.stdout)
    assert endings.keys() == words.keys()
    for name, (code, errors) in endings.items():
        assert "Traceback" not in errors, (name, errors)
        if name in ONLY_EXTRAS:
            assert code in (1, 2)
            assert re.search(r"pip install (?!.*\bpenstock\b).*deepspeed", errors), (name, errors)


@pytest.fixture
def project(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the example and without the code, where any bare import fails; its run ends with the test."""
    folder, traps = tmp_path / "project", tmp_path / "traps"
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    traps.mkdir()
    for name in ("services", "shared"):
        (traps / f"{name}.py").write_text("raise ImportError('a wheel has no such name')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (wheel, traps))))
    yield folder
    for run in (folder / "runs").glob("run-*"):
        if (run / "coordinator.json").exists():
            Run.open(run).stop("the test has ended")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_trains_asks_and_rolls_back(project: Path) -> None:
    notebook = nbformat.read(project / "examples/python-api.ipynb", as_version=4)
    place = {"metadata": {"path": str(project / "examples")}}
    NotebookClient(notebook, timeout=int(4 * PATIENCE_S), resources=place).execute()
    shown = [_text(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert re.fullmatch(r"(\d \d\.\d+\n){5}", shown[2])
    assert len(re.findall(r"\('[^']*', \(\d+(?:, \d+)*,?\)\)", shown[3])) == 4
    assert shown[4].split() == ["1", "2", "3"], "the steps after the version that was rolled back to"
    assert "'report.html'" in shown[5]


def _text(cell: nbformat.NotebookNode) -> str:
    outputs = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(text for text in outputs if isinstance(text, str))
