"""Neither neighbours nor other load use up a program's deadline."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.services.reward.executor import probe
from penstock.services.reward.executor import program as supervisor
from penstock.services.reward.executor.executor import Executor
from penstock.services.reward.executor.isolation import Interpreter, candidates
from penstock.services.reward.executor.slots import SUSPENDED_BYTES_PER_SLOT, Slots, Usage, quota
from penstock.services.reward.executor.verdict import Ended, ProgramReport, outcome_of
from penstock.shared.executor.protocol import Execution, Job, Limits, Outcome
from penstock.shared.settings.rewards.reward import ExecutorSettings

BUSY = "print('ready', flush=True)\nwhile True: pass"
NEIGHBOURS = 5
PATIENT = Limits(wall_s=60.0, cpu_s=60.0)


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
    assert ended.cpu_s < 15.0, (
        "30 if each had a second: its threads have one core, and their waiting for it is not a neighbour's doing"
    )


@pytest.mark.parametrize("executor", ["namespace"], indirect=True)  # its supervisor is that of every way
async def test_a_sleeper_is_killed_at_its_deadline_however_busy_the_machine_is(core: int, executor: Executor) -> None:
    ended = await executor.run(Job("import time; time.sleep(1000)", limits=Limits(wall_s=0.5)))
    assert (ended.outcome, ended.detail) == (Outcome.TIMEOUT, "ran longer than 0.5 s")


@pytest.mark.parametrize("executor", ["namespace"], indirect=True)  # its supervisor is that of every way
async def test_waiting_has_an_end_which_is_the_hosts_fault(
    core: int, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST", 2)
    ended = await executor.run(Job("while True: pass", limits=Limits(wall_s=1.0, cpu_s=60.0)))
    assert (ended.outcome, ended.detail) == (Outcome.SANDBOX_ERROR, "did not end within 2 s")


@pytest.mark.parametrize(("cpu_s", "outcome"), [(0.9, Outcome.SANDBOX_ERROR), (1.0, Outcome.TIMEOUT)])
def test_a_program_that_had_the_time_of_its_limit_cannot_blame_the_host(cpu_s: float, outcome: Outcome) -> None:
    ended, started = Ended(-9, 10.0, cpu_s, 0), ProgramReport(started=True, values=(), error="")
    late = (Outcome.SANDBOX_ERROR, "did not end within 10 s")
    assert outcome_of(ended, started, Limits(wall_s=1.0, cpu_s=60.0), 0, late) == (outcome, late[1])


@contextlib.asynccontextmanager
async def beside(executor: Executor, programs: int) -> AsyncIterator[list[asyncio.Task[Execution]]]:
    """Run endless programs."""
    tasks = [asyncio.create_task(executor.run(Job("while True: pass", limits=PATIENT))) for _ in range(programs)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_new_program_ends_before_endless_ones_that_came_first(executor: Executor) -> None:
    async with beside(executor, 3) as endless:
        ended = await executor.run(Job("print(6)", limits=PATIENT))
        assert (ended.outcome, ended.stdout) == (Outcome.FINISHED, "6\n"), ended
        assert not any(task.done() for task in endless)


async def test_the_deadlines_of_a_program_stop_while_it_is_suspended(executor: Executor) -> None:
    code = "import time\nwhile time.process_time() < 0.7: pass\nprint(6)"
    async with beside(executor, 3) as endless:
        ended = await executor.run(Job(code, limits=Limits(wall_s=1.4, cpu_s=60.0)))
        assert (ended.outcome, ended.stdout) == (Outcome.FINISHED, "6\n"), ended
        assert not any(task.done() for task in endless)


async def test_a_stream_of_new_programs_starves_no_old_one(executor: Executor) -> None:
    code = "import time\nwhile time.process_time() < 0.6: pass\nprint(6)"
    old = asyncio.create_task(executor.run(Job(code, limits=PATIENT)))

    async def stream() -> None:
        while not old.done():
            await executor.run(Job("import time\nwhile time.process_time() < 0.02: pass", limits=PATIENT))

    await asyncio.gather(*(stream() for _ in range(3)))
    assert (await old).stdout == "6\n"


async def test_a_suspended_program_is_killed_when_its_caller_leaves(executor: Executor) -> None:
    async with beside(executor, 4):
        assert (await executor.run(Job("print(6)", limits=PATIENT))).stdout == "6\n"
    assert (await executor.run(Job("print(7)"))).stdout == "7\n"


class Recorded:
    """A program that has used a minute and ``resident_bytes``."""

    def __init__(self, resident_bytes: int = 0) -> None:
        self.resident_bytes = resident_bytes
        self.suspended = asyncio.Event()

    async def usage(self) -> Usage:
        return Usage(60.0, 60.0, self.resident_bytes)

    def suspend(self) -> None:
        self.suspended.set()

    def resume(self) -> None:
        self.suspended.clear()


async def test_no_more_memory_is_suspended_than_the_host_was_sized_for() -> None:
    slots, light, heavy = Slots(1), Recorded(), Recorded(SUSPENDED_BYTES_PER_SLOT + 1)
    async with contextlib.AsyncExitStack() as stack:
        (await stack.enter_async_context(slots.claim())).program = light
        (await stack.enter_async_context(slots.claim())).program = heavy
        third = asyncio.create_task(stack.enter_async_context(slots.claim()))
        await light.suspended.wait()
        await asyncio.sleep(0.1)  # several looks
        assert not third.done()
        assert not heavy.suspended.is_set()
        heavy.resident_bytes = SUSPENDED_BYTES_PER_SLOT
        await third
        assert heavy.suspended.is_set()
    await slots.close()


async def test_programs_share_a_core_only_when_there_are_more_of_them_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 8})
    slots = Slots(7)

    async def cores(stack: contextlib.AsyncExitStack, programs: int) -> list[int]:
        return sorted([(await stack.enter_async_context(slots.claim())).core for _ in range(programs)])

    async with contextlib.AsyncExitStack() as first, contextlib.AsyncExitStack() as second:
        assert await cores(first, 3) == [3, 5, 8]
        assert await cores(second, 3) == [3, 5, 8]
        await second.aclose()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 9})
        assert await cores(second, 1) == [9]


@pytest.mark.parametrize(("asked", "slots"), [(0, 3), (2, 2), (3, 3), (64, 3)])
def test_no_more_programs_run_at_a_time_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, asked: int, slots: int
) -> None:
    monkeypatch.setattr("penstock.services.reward.executor.probe.count", lambda: 3)
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
