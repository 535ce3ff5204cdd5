"""Neither neighbours nor other load use up a program's deadline."""

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.reward.executor import executor as supervisor
from services.reward.executor import probe
from services.reward.executor.cores import Cores, quota
from services.reward.executor.executor import Executor
from services.reward.executor.isolation import Interpreter, candidates
from services.reward.executor.protocol import Job, Limits, Outcome
from shared.settings import ExecutorSettings

BUSY = "print('ready', flush=True)\nwhile True: pass"
NEIGHBOURS = 5


@pytest.fixture
def core() -> Iterator[int]:
    """Limit this process and its children to one core, shared with busy processes of other sessions."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(0, {core})
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        for _ in range(NEIGHBOURS):
            command = [sys.executable, "-I", "-c", BUSY]
            busy = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            stack.callback(busy.wait)
            stack.callback(busy.kill)
            assert busy.stdout is not None
            stack.enter_context(busy.stdout)
            assert busy.stdout.readline() == b"ready\n"
        yield core


@pytest.fixture(params=["namespace", "landlock"])
async def executor(request: pytest.FixtureRequest) -> AsyncIterator[Executor]:
    way = candidates(request.param, Interpreter.find(""), 65_534, 1)[0]
    executor = Executor(way, ("stdlib",), slots=1, recycle_after=1000)
    try:
        await executor.start()
        yield executor
    finally:
        await executor.close()


async def test_time_in_which_others_have_the_core_does_not_count(core: int, executor: Executor) -> None:
    code = f"import os, time\nwhile time.process_time() < 0.4: pass\nprint(os.sched_getaffinity(0) == {{{core}}})"
    ended = await executor.run(Job(code, limits=Limits(wall_s=1.2, cpu_s=60.0)))
    assert (ended.outcome, ended.stdout) == (Outcome.FINISHED, "True\n"), ended
    assert ended.wall_s > 1.2, "its neighbours took so much that wall time alone would have been over"


async def test_threads_that_wait_for_one_another_are_charged_for_it(executor: Executor) -> None:
    code = "import threading\ndef burn():\n  while True: pass\nfor _ in range(30): threading.Thread(target=burn).start()\nburn()"
    ended = await executor.run(Job(code, limits=Limits(wall_s=1.0, cpu_s=60.0)))
    assert (ended.outcome, ended.detail) == (Outcome.TIMEOUT, "ran longer than 1 s")
    assert ended.cpu_s < 2.0, "its threads have one core, and their waiting for it is not a neighbour's doing"


async def test_a_sleeper_is_killed_at_its_deadline_however_busy_the_machine_is(core: int, executor: Executor) -> None:
    ended = await executor.run(Job("import time; time.sleep(1000)", limits=Limits(wall_s=0.5)))
    assert (ended.outcome, ended.detail) == (Outcome.TIMEOUT, "ran longer than 0.5 s")


async def test_waiting_has_an_end(core: int, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST", 2)
    ended = await executor.run(Job("while True: pass", limits=Limits(wall_s=1.0, cpu_s=60.0)))
    assert (ended.outcome, ended.detail) == (Outcome.TIMEOUT, "did not end within 2 s")


def test_programs_share_a_core_only_when_there_are_more_of_them_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 8})
    cores = Cores()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        assert sorted(first.enter_context(cores.take()) for _ in range(3)) == [3, 5, 8]
        assert sorted(second.enter_context(cores.take()) for _ in range(3)) == [3, 5, 8]
        second.close()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 9})
        assert second.enter_context(cores.take()) == 9


@pytest.mark.parametrize(("asked", "slots"), [(0, 3), (2, 2), (3, 3), (64, 3)])
def test_no_more_programs_run_at_a_time_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, asked: int, slots: int
) -> None:
    monkeypatch.setattr("services.reward.executor.cores.count", lambda: 3)
    assert probe.slots(ExecutorSettings(slots=asked)) == slots


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"pod/box/cpu.max": "max 100000"}, float("inf")),
        ({"pod/box/cpu.max": "max 100000", "pod/cpu.max": "250000 100000"}, 2.5),
        ({"pod/box/cpu.max": "50000 100000", "pod/cpu.max": "250000 100000"}, 0.5),
        ({"cpu.max": "400000 100000"}, 4.0),
        ({"pod/box/cpu.max": "nonsense"}, float("inf")),
    ],
)
def test_the_cores_of_a_container_are_those_of_its_quota(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    (tmp_path / "groups/pod/box").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "groups" / name).write_text(text + "\n")
    (tmp_path / "membership").write_text("1:cpu:/elsewhere\n0::/pod/box\n")
    assert quota(tmp_path / "groups", tmp_path / "membership") == cores
    assert quota(tmp_path / "groups", tmp_path / "nothing") == float("inf")
