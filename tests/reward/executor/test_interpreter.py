"""An interpreter that the programs' user cannot read, as with a Python in root's home."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reward.executor import executor as benchmarked
from penstock.services.reward.executor.executor import Executor
from penstock.services.reward.executor.isolation import Interpreter, Isolation, _has_capabilities, candidates
from penstock.shared.executor.protocol import Job, Outcome
from tests.conftest import PATIENCE_S

USER = 65_534


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Isolation:
    if os.geteuid() != 0 or not _has_capabilities():
        pytest.skip("only root can have a folder that the executor's user cannot read")
    folder = tmp_path_factory.mktemp("private")
    (folder / "bin").mkdir()
    (folder / "lib").symlink_to(Path(sys.base_prefix, "lib"))
    program = shutil.copy(os.path.realpath(sys.executable), folder / "bin" / "python3")
    folder.chmod(0o700)
    (way,) = candidates("landlock", Interpreter.find(str(program)), USER, 1)
    return way


async def test_a_program_imports_of_a_library_that_its_user_cannot_read(private: Isolation) -> None:
    assert private.interpreter.program in private.unreadable
    executor = Executor(private, ("stdlib",), slots=1, recycle_after=1000)
    try:
        await executor.start()
        ended = await executor.run(Job("import os, wave\nprint(wave.__name__, os.getuid())"))
    finally:
        await executor.close()
    assert (ended.outcome, ended.stdout) == (Outcome.FINISHED, f"wave {USER}\n")


def test_an_interpreter_that_cannot_be_mounted_is_refused_with_the_path_and_what_to_change(private: Isolation) -> None:
    nobody_mounts = ("setpriv", "--bounding-set", "-sys_admin")
    done = subprocess.run(
        [*nobody_mounts, *private.command("stdlib", 0)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"expected user {USER}, as whom programs run, to be able to read")
    assert (
        "and it cannot be mounted elsewhere ([Errno 1] unshare(CLONE_NEWNS): EPERM): install bubblewrap, or" in sentence
    )
    assert str(Path(private.interpreter.program).parent.parent) in sentence


async def test_the_benchmark_says_what_the_executor_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="namespace: bwrap not found: install bubblewrap"):
        async with benchmarked("namespace", 1):
            pytest.fail("an executor without bubblewrap answered")
