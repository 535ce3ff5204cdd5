"""Break chosen laws one by one, and require that their tests notice.

    python -m tests.support.mutants [NAME]...

The tests must pass in a copy of this repository. Then each mutant of mutants.toml replaces one text of it, which occurs
once in its file, and the tests that guard it must fail. The last line is a JSON object with the mutants killed and those that survived.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800.0


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
        return pytest_of(mutant["tests"].split(), copy, "-x", "-n", "0") == 1
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(before, encoding="utf-8")


def pytest_of(tests: list[str], copy: Path, *flags: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", *flags, *tests]
    return subprocess.run(command, cwd=copy, capture_output=True, timeout=LIMIT_S, check=False).returncode


def main(names: list[str]) -> dict[str, Any]:
    chosen = {name: mutant for name, mutant in mutants().items() if not names or name in names}
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "penstock"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for path in filter(None, tracked):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, copy / path)
        (copy / ".venv").symlink_to(ROOT / ".venv")
        os.environ["PYTHONPATH"] = str(copy)
        guards = sorted({path for mutant in chosen.values() for path in mutant["tests"].split()})
        if pytest_of(guards, copy, "-n", "3", "--dist", "loadfile") != 0:
            raise RuntimeError("expected the tests to pass without a mutant: run make test")
        for name, mutant in chosen.items():
            killed = is_killed(mutant, copy)
            print(f"{name}: {'killed' if killed else 'SURVIVED'}", flush=True)
            survived += [] if killed else [name]
    return {"benchmark": "mutants", "mutants": len(chosen), "killed": len(chosen) - len(survived), "survived": survived}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
