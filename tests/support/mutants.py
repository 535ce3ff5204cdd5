"""Break chosen laws one by one, and require that their tests notice.

    python -m tests.support.mutants [NAME]...

The tests must pass in a copy of this repository. Then each mutant of mutants.toml replaces one text of it, which occurs
once in its file, and the tests that guard it must fail. Tests run in forks of this process, which has imported what is
large. The last line is a JSON object with the mutants killed and those that survived.
"""

import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800.0
PATIENCE_S = "60"
"""Of tests that wait for what a mutant prevents."""
IMPORTED = (
    "deepspeed", "fastapi", "peft", "redis.asyncio", "transformers.models.qwen2.modeling_qwen2", "typer", "uvicorn",
)  # fmt: skip
FAILED = 1
"""pytest's exit status; other failures are those of the mutant's row."""


def mutants() -> dict[str, dict[str, str]]:
    return tomllib.loads((ROOT / "tests/support/mutants.toml").read_text(encoding="utf-8"))


def mutated(mutant: dict[str, str], root: Path = ROOT) -> str:
    """Return the file's text with the mutant in it."""
    text = (root / mutant["file"]).read_text(encoding="utf-8")
    if text.count(mutant["old"]) != 1:
        raise ValueError(f"expected {mutant['old']!r} once in {mutant['file']}, not {text.count(mutant['old'])} times")
    return text.replace(mutant["old"], mutant["new"])


def is_killed(mutant: dict[str, str], copy: Path) -> bool:
    """Say whether the mutant's tests fail in the copy, which is restored."""
    file = copy / mutant["file"]
    before = file.read_text(encoding="utf-8")
    file.write_text(mutated(mutant, copy), encoding="utf-8")
    try:
        status = status_of(mutant["tests"].split(), copy)
    finally:
        file.write_text(before, encoding="utf-8")
    if status not in (0, FAILED):
        raise RuntimeError(f"expected the tests to pass or to fail, not pytest's status {status}")
    return status == FAILED


def status_of(tests: list[str], copy: Path) -> int:
    """Return pytest's exit status up to the first failure. Tests that exceed the limit have failed."""
    pid = os.fork()
    if pid == 0:
        _test(tests, copy)
    ended = os.pidfd_open(pid)
    try:
        if not select.select([ended], [], [], LIMIT_S)[0]:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(ended)
    return FAILED if status < 0 else status


def _test(tests: list[str], copy: Path) -> NoReturn:
    os.setsid()
    os.chdir(copy)
    os.dup2(os.open(copy.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stdout.fileno())
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("penstock", "tests")]:
        del sys.modules[name]
    status = 3  # pytest's, of an internal error
    try:
        import pytest

        status = int(pytest.main(["-x", "-n", "0", "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # skip clean-up of libraries


def main(names: list[str]) -> dict[str, Any]:
    chosen = {name: mutant for name, mutant in mutants().items() if not names or name in names}
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "penstock"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for path in filter(None, tracked):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
        (copy / ".venv").symlink_to(ROOT / ".venv")
        os.environ |= {"PYTHONPATH": str(copy), "PENSTOCK_PATIENCE_S": PATIENCE_S}
        for name in IMPORTED:
            importlib.import_module(name)
        guards = sorted({path for mutant in chosen.values() for path in mutant["tests"].split()})
        if status_of(guards, copy) != 0:
            output = (copy.parent / "output.txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"expected the tests to pass without a mutant:\n{output[-3000:]}")
        for name, mutant in chosen.items():
            killed = is_killed(mutant, copy)
            print(f"{name}: {'killed' if killed else 'SURVIVED'}", flush=True)
            survived += [] if killed else [name]
    return {"benchmark": "mutants", "mutants": len(chosen), "killed": len(chosen) - len(survived), "survived": survived}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
