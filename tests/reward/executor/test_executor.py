"""Verdicts of the executor, failures of its parts, and clean-up."""

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from penstock.services.reward.executor import escapes, probe
from penstock.services.reward.executor.executor import Executor
from penstock.services.reward.executor.inside import syscalls
from penstock.services.reward.executor.isolation import Interpreter, candidates
from penstock.services.reward.executor.server import serve
from penstock.services.reward.executor.verdict import Ended, ProgramReport, outcome_of, read_report
from penstock.services.up import plan
from penstock.services.up.process_tree import is_alive
from penstock.shared.errors import PeerError, SettingsError, TemporaryError
from penstock.shared.executor import client as executor_client
from penstock.shared.executor import protocol
from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import (
    MAX_OUTPUT_BYTES,
    Call,
    Execution,
    Job,
    Limits,
    Outcome,
    execution_frame,
    job_frame,
    read_execution,
    read_job,
)
from penstock.shared.peers import frames
from penstock.shared.peers.keep_alive import SILENT_S
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.reward import ExecutorSettings
from tests.conftest import PATIENCE_S, need, until
from tests.support.children import children
from tests.support.executor_process import ROOT, Running, arguments, desk, running

LANDLOCK = ("--reward.executor.isolation", "landlock", "--internal.executor_profiles", '["stdlib"]')
_OF_OTHERS = ("penstock-", "psm_", "sem.", "torch_")
"""Prefixes of other processes' shared memory: Penstock's weights, queues of vLLM and multiprocessing, torch's tensors.
"""
ENDED = Execution(Outcome.FINISHED, "1\n", (), "", 0, 0.01, 0.01, 1 << 20, "landlock")
JOBS = int(os.environ.get("PENSTOCK_EXECUTOR_JOBS", "1000"))


@pytest.fixture(scope="module")
def process() -> Iterator[Running]:
    """In the strongest available tier, with both profiles."""
    need("bwrap", "bubblewrap")
    with running("--internal.executor_check_s", "1000") as process:
        yield process


@pytest.fixture
async def client(process: Running) -> AsyncIterator[ExecutorClient]:
    made = ExecutorClient(process.address)
    yield made
    await made.close()


# ---------------------------------------------------------------- what is said of programs


async def test_a_program_reads_its_input_and_its_output_is_returned(client: ExecutorClient) -> None:
    ended = await client.run(Job("print(sum(int(input()) for _ in range(2)))", stdin="20\n22\n"))
    assert (ended.outcome, ended.stdout, ended.exit_status, ended.tier) == (Outcome.FINISHED, "42\n", 0, "namespace")
    assert ended.wall_s > 0
    assert ended.peak_bytes > 1 << 20


async def test_values_keep_their_exact_types(client: ExecutorClient) -> None:
    code = "def f(x): return [x, 1, 1.0, True, None, (2, 'é'), 2**200, {1: 'a', 'b': [float('inf')]}]"
    ended = await client.run(Job(code, calls=(Call("f", ("x",)),)))
    (value,) = map(json.loads, ended.values)
    assert value == ["x", 1, 1.0, True, None, [2, "é"], 2**200, {"1": "a", "b": [float("inf")]}]
    assert [type(item) for item in value] == [str, int, float, bool, type(None), list, int, dict]


async def test_calls_share_one_interpreter_and_methods_have_an_object_of_their_own(client: ExecutorClient) -> None:
    code = "n = 0\ndef f(by=1):\n  global n\n  n += by\n  return n\nclass Solution:\n  def g(self, x): return [x, __name__]"
    calls = (Call("f"), Call("f", (), {"by": 5}), Call("Solution.g", (2,)))
    assert (await client.run(Job(code, calls=calls))).values == ("1", "6", '[2, "program"]')


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("1 / 0", Outcome.RUNTIME_ERROR, "ZeroDivisionError: division by zero"),
        ("def f(:", Outcome.RUNTIME_ERROR, "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", Outcome.RUNTIME_ERROR, "exit status 3"),
        ("raise SystemExit('why')", Outcome.RUNTIME_ERROR, "SystemExit: why"),
        ("raise SystemExit", Outcome.FINISHED, ""),
        ("import os; os._exit(7)", Outcome.RUNTIME_ERROR, "exit status 7"),
        ("x = [0] * 10**9", Outcome.MEMORY, "limit 536870912 bytes"),
        ("while True: print('x' * 10000)", Outcome.OUTPUT_LIMIT, "wrote more than 1048576 bytes"),
        ("import torch", Outcome.RUNTIME_ERROR, "ModuleNotFoundError: No module named 'torch'"),
        (
            "class E(Exception):\n  def __str__(self): raise self\nraise E",
            Outcome.RUNTIME_ERROR,
            "E: <exception str() failed>",
        ),
    ],
)
async def test_an_ending_is_named(client: ExecutorClient, code: str, outcome: Outcome, detail: str) -> None:
    ended = await client.run(Job(code))
    assert (ended.outcome, ended.detail) == (outcome, detail)


async def test_numpy_is_there_in_its_profile_alone_and_random_numbers_differ_between_programs(
    client: ExecutorClient,
) -> None:
    code = "import random, numpy\nprint(numpy.arange(4).sum(), random.random(), numpy.random.rand())"
    actual = [(await client.run(Job(code, "numpy"))).stdout.split() for _ in range(2)]
    assert [words[0] for words in actual] == ["6", "6"]
    assert len({word for words in actual for word in words[1:]}) == 4
    assert (await client.run(Job(code))).detail == "ModuleNotFoundError: No module named 'numpy'"


async def test_many_programs_run_at_once_and_answers_find_their_askers(client: ExecutorClient) -> None:
    answers = await asyncio.gather(*(client.run(Job("print(input())", stdin=str(number))) for number in range(100)))
    assert [answer.stdout for answer in answers] == [f"{number}\n" for number in range(100)]
    unknown = await client.run(Job("print(1)", profile="julia"))
    assert unknown.outcome is Outcome.SANDBOX_ERROR
    assert (
        unknown.detail
        == "expected a profile of stdlib, numpy, found 'julia': start the executor with the settings of the run"
    )


# ---------------------------------------------------------------- what a verdict is


@pytest.mark.parametrize(
    ("status", "cpu_s", "started", "outcome"),
    [
        (0, 0.1, True, Outcome.FINISHED),
        (0, 0.1, False, Outcome.SANDBOX_ERROR),
        (-9, 0.1, True, Outcome.SANDBOX_ERROR),
        (-9, 4.9, True, Outcome.TIMEOUT),
        (-24, 0.1, True, Outcome.TIMEOUT),
        (-31, 0.1, True, Outcome.FORBIDDEN),
        (-11, 0.1, True, Outcome.RUNTIME_ERROR),
        (113, 0.1, True, Outcome.MEMORY),
        (1, 0.1, True, Outcome.RUNTIME_ERROR),
    ],
)
def test_the_wait_status_decides(status: int, cpu_s: float, started: bool, outcome: Outcome) -> None:
    ended = Ended(status, wall_s=1.0, cpu_s=cpu_s, peak_bytes=0)
    assert outcome_of(ended, ProgramReport(started, (), ""), Limits(), 0, None)[0] is outcome


def test_a_report_is_read_up_to_the_first_line_that_is_none() -> None:
    assert read_report(b"ready\nvalue 1\nvalue [2]\nerror E: x\nvalue 3\n", 9) == ProgramReport(
        True, ("1", "[2]"), "E: x"
    )
    assert read_report(b"ready\nvalue 1\nnonsense\nvalue 3\n", 9) == ProgramReport(True, ("1",), "")
    assert read_report(b"ready\nerror " + b"x" * 9999 + b"\nvalue 3\n", 0) == ProgramReport(True, (), "x" * 1000)
    assert read_report(b"error OSError: mount: EPERM\n", 9) == ProgramReport(False, (), "OSError: mount: EPERM")
    assert read_report(b"", 9) == ProgramReport(False, (), "")
    assert read_report(b"ready\n" + b"value 0\n" * 131_072, 2) == ProgramReport(True, ("0", "0", "0"), "")


def test_messages_survive_the_wire_and_other_content_is_refused() -> None:
    job = Job(
        "x", "numpy", "in", (Call("f", (1, [None]), {"a": 2**70}), Call("f", expression="f(1)")), Limits(wall_s=1.5)
    )
    assert read_job(job_frame(3, job)) == job
    ended = Execution(Outcome.MEMORY, "out", (str(2**70), '{"a": null}'), "d", -9, 0.1, 0.2, 3, "landlock")
    assert read_execution(execution_frame(3, ended)) == ended
    assert read_job(job_frame(3, Job("\ud800"))).code == "?"
    for wrong in (
        {"code": 1},
        {"calls": "["},
        {"limits": {"walls": 1}},
        {"limits": {"wall_s": -1}},
        {"limits": {"cpu_s": 1e999}},
        {"limits": {"output_bytes": MAX_OUTPUT_BYTES + 1}},
        {"profile": None},
    ):
        with pytest.raises(PeerError, match="expected a job"):
            read_job(job_frame(3, job) | wrong)


@pytest.mark.parametrize("text", ["[" * 100_000, "1],[2", "nonsense", "9" * 5000, '"', "1}"])
def test_a_value_is_not_read_before_it_is_compared(text: str) -> None:
    ended = Execution(Outcome.FINISHED, "out", (text,), "", 0, 0.1, 0.2, 3, "landlock")
    assert read_execution(execution_frame(3, ended)) == ended


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_the_table_of_system_calls_agrees_with_libseccomp(machine: str, architecture: int) -> None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("needs libseccomp.so.2 from Debian's package libseccomp2")
    resolve = library.seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    column = syscalls.MACHINES.index(machine)
    tables = (syscalls.ALLOWED, syscalls.CONDITIONAL, syscalls.DEADLY)
    assert len({name for table in tables for name in table}) == sum(map(len, tables)), "a call stands in two tables"
    for name, numbers in (pair for table in tables for pair in table.items()):
        known = resolve(architecture, name.encode())
        assert numbers[column] == (known if known >= 0 else None), name


# ---------------------------------------------------------------- tiers


async def test_no_tier_means_no_start_and_every_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    settings = ExecutorSettings(interpreter=sys.executable)
    interpreter = Interpreter.find("")
    broken = Interpreter(interpreter.program, ("/nowhere",), "")
    monkeypatch.setattr(Interpreter, "find", lambda _: broken)
    monkeypatch.setattr("penstock.services.reward.executor.isolation._SYSTEM", ())
    with escapes.targets() as targets, pytest.raises(SettingsError) as refusal:
        await probe.start(settings, ("stdlib",), targets, recycle_after=1000)
    lines = str(refusal.value).splitlines()
    assert lines[0] == "no isolation tier works on this host:"
    assert lines[1] == "  namespace: bwrap not found: install bubblewrap"
    assert lines[2].startswith("  landlock: ")
    assert lines[3] == "docs/sandbox.md says what each tier needs (reward.executor.isolation)"
    monkeypatch.setattr("penstock.services.reward.executor.inside.confinement.landlock_abi", lambda: 2)
    with (
        escapes.targets() as targets,
        pytest.raises(SettingsError, match="this kernel does not offer Landlock, which both"),
    ):
        await probe.start(settings, ("stdlib",), targets, recycle_after=1000)


def test_a_refusal_is_one_message_and_exit_code_2() -> None:
    flags = ("--reward.executor.isolation", "namespace", "--internal.executor_profiles", '["stdlib"]')
    command = arguments("unix:/tmp/penstock-test-none.sock", *flags)
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "penstock executor: no isolation tier works on this host:\npenstock executor:   namespace: bwrap"
    )


def test_unsafe_is_loud_and_only_on_request(tmp_path: Path) -> None:
    flags = ("--reward.executor.isolation", "unsafe", "--internal.executor_profiles", '["stdlib"]')
    with running(*flags) as process:
        assert process.ready()["tier"] == "unsafe"
        metrics = process.get("/metrics")
        assert 'penstock_executor_info{tier="unsafe"} 1.0' in metrics
        assert "penstock_bus_available NaN" in metrics, "it needs no bus: 0 would be an outage"
        assert 'penstock_executor_executions_total{outcome="sandbox_error",profile="stdlib"} 0.0' in metrics

        async def ask() -> Execution:
            client = ExecutorClient(process.address)
            try:
                return await client.run(Job("print(open('/etc/hostname').read() != '')"))
            finally:
                await client.close()

        ended = asyncio.run(ask())
        assert (ended.tier, ended.stdout) == ("unsafe", "True\n")
        assert "WITHOUT ISOLATION" in (Path(process.address.removeprefix("unix:")).parent / "log").read_text()


def test_a_sandbox_that_lets_a_program_out_is_not_chosen() -> None:
    leaky = Execution(Outcome.FINISHED, "read 'of the host'\n", (), "", 0, 0.1, 0.1, 1, "landlock")
    assert escapes.escaped(leaky) == "read 'of the host'"
    broken = Execution(Outcome.RUNTIME_ERROR, "", (), "ImportError: ctypes", 1, 0.1, 0.1, 1, "landlock")
    assert escapes.escaped(broken) == "runtime_error: ImportError: ctypes"
    assert escapes.works(broken) == "a harmless program ended as runtime_error: ImportError: ctypes"


async def test_an_unprivileged_user_at_a_desk_has_namespaces_too(tmp_path: Path) -> None:
    wrapper = desk()
    with running("--reward.executor.isolation", "auto", wrapper=wrapper) as process:
        client = ExecutorClient(process.address)
        ended = await client.run(Job("import os, numpy\nprint(os.getpid(), os.getuid())", "numpy"))
        await client.close()
    assert (ended.tier, ended.stdout) == ("namespace", "1 64123\n")


# ---------------------------------------------------------------- what happens when something dies


async def test_a_client_that_leaves_takes_its_programs_with_it(process: Running) -> None:
    client = ExecutorClient(process.address)
    running_job = asyncio.create_task(client.run(Job("while True: pass", limits=Limits(60.0, 60.0))))
    await until(lambda: "penstock_executor_programs_in_progress 1.0" in process.get("/metrics"))
    await client.close()
    with pytest.raises(TemporaryError):
        await running_job
    await until(lambda: "penstock_executor_programs_in_progress 0.0" in process.get("/metrics"))


async def test_a_client_that_is_closed_before_it_has_read_leaves_nobody_waiting(process: Running) -> None:
    client = ExecutorClient(process.address)
    asker = asyncio.create_task(client.run(Job("while True: pass", limits=Limits(60.0, 60.0))))
    while client._writer is None:
        await asyncio.sleep(0)
    await client.close()
    with pytest.raises(TemporaryError):
        await asyncio.wait_for(asker, PATIENCE_S)


async def test_an_asker_that_is_cancelled_has_its_program_killed(process: Running, client: ExecutorClient) -> None:
    asker = asyncio.create_task(client.run(Job("while True: pass", limits=Limits(60.0, 60.0))))
    await until(lambda: "penstock_executor_programs_in_progress 1.0" in process.get("/metrics"))
    asker.cancel()
    await until(lambda: "penstock_executor_programs_in_progress 0.0" in process.get("/metrics"))
    assert (await client.run(Job("print(1)"))).stdout == "1\n"


async def test_a_peer_that_speaks_something_else_is_shown_the_door(process: Running, client: ExecutorClient) -> None:
    reader, writer = await asyncio.open_unix_connection(process.address.removeprefix("unix:"))
    writer.write(frames.pack({"verb": "run", "id": 1, "code": 5}))
    assert await frames.receive_async(reader) == {"beat": True}
    assert await reader.read() == b""
    writer.close()
    assert (await client.run(Job("print(1)"))).stdout == "1\n"


@contextlib.asynccontextmanager
async def warm(slots: int) -> AsyncIterator[tuple[Executor, psutil.Process]]:
    """Yield an executor in this process and its warm interpreter."""
    interpreter = Interpreter.find("")
    (way,) = candidates("landlock", interpreter, 65_534, 1)
    executor = Executor(way, ("stdlib",), slots=slots, recycle_after=1000)
    try:
        await executor.start()
        (zygote,) = children(interpreter.program)
        yield executor, zygote
    finally:
        await executor.close()


async def test_a_zygote_that_dies_is_replaced_and_what_it_ran_is_no_score() -> None:
    async with warm(slots=2) as (executor, zygote):
        lost = asyncio.create_task(executor.run(Job("while True: pass", limits=Limits(60.0, 60.0))))
        await until(zygote.children)
        (program,) = zygote.children()
        zygote.kill()
        ended = await lost
        assert (ended.outcome, ended.detail) == (Outcome.SANDBOX_ERROR, "the warm interpreter died")
        await until(lambda: not psutil.pid_exists(program.pid))
        assert (await executor.run(Job("print(2)"))).stdout == "2\n"


async def test_a_program_whose_zygote_dies_before_it_is_confined_ends_too() -> None:
    async with warm(slots=1) as (executor, zygote):
        slow_to_read = "#" * 10_000_000 + "\nwhile True: pass"
        lost = asyncio.create_task(executor.run(Job(slow_to_read, limits=Limits(600.0, 600.0))))
        path = Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children")
        while not (pids := path.read_text().split()):
            await asyncio.sleep(0)
        zygote.kill()
        time.sleep(1.0)  # so that what the program reports to stays open, the end of which would end it, too
        ended = await lost
        assert (ended.outcome, ended.detail) == (Outcome.SANDBOX_ERROR, "the warm interpreter died")
        await until(lambda: not psutil.pid_exists(int(pids[0])))


async def test_a_zygote_that_does_not_react_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with warm(slots=1) as (executor, zygote):
        zygote.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as hasty:
            hasty.setattr("penstock.services.reward.executor.program.REACTS_WITHIN_S", 0.5)
            ended = await executor.run(Job("print(1)", limits=Limits(wall_s=0.2)))
        assert (ended.outcome, ended.detail) == (
            Outcome.SANDBOX_ERROR,
            "the warm interpreter did not end a program within 0.5 s",
        )
        assert (await executor.run(Job("print(2)"))).stdout == "2\n"
        assert not is_alive(zygote.pid)


async def test_a_client_finds_an_executor_that_came_back_and_says_so_while_there_is_none(tmp_path: Path) -> None:
    client = ExecutorClient(f"unix:{tmp_path}/none.sock")
    with pytest.raises(
        TemporaryError,
        match=r"could not reach the code executor at unix:.*: start it, or change reward\.executor\.address",
    ):
        await client.run(Job("print(1)"))
    with running(*LANDLOCK) as process:
        (tmp_path / "none.sock").symlink_to(process.address.removeprefix("unix:"))
        assert (await client.run(Job("print(1)"))).stdout == "1\n"
    await client.close()


# ---------------------------------------------------------------- who may run programs


async def test_only_a_client_that_knows_the_secret_may_run_programs(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("the-secret-of-executor-and-scorer\n")
    file.chmod(0o600)
    with running(*LANDLOCK, "--reward.executor.secret_file", str(file)) as process:
        for secret in (b"", b"another-secret-of-some-length"):
            stranger = ExecutorClient(process.address, secret=secret)
            with pytest.raises(TemporaryError, match=r"could not reach the code executor at .* or secret_file"):
                await stranger.run(Job("print(1)"))
            await stranger.close()
        client = ExecutorClient(process.address, secret=b"the-secret-of-executor-and-scorer")
        assert (await client.run(Job("print(1)"))).stdout == "1\n"
        await client.close()
        for silent in [await asyncio.open_unix_connection(process.address.removeprefix("unix:")) for _ in range(80)]:
            silent[1].close()
        again = ExecutorClient(process.address, secret=b"the-secret-of-executor-and-scorer")
        assert (await again.run(Job("print(2)"))).stdout == "2\n"
        await again.close()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.1.2.3:7070", "[::]:0", "executor:7070"])
async def test_an_address_that_others_reach_needs_a_secret(address: str) -> None:
    with pytest.raises(
        SettingsError, match=r"other machines can reach the executor at .*, which needs reward\.executor\.secret_file"
    ):
        async with serve(cast(Executor, None), address, 1):
            pass


# ---------------------------------------------------------------- nothing is left behind


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_thousand_programs_leave_no_process_descriptor_memory_or_file() -> None:
    need("bwrap", "bubblewrap")
    flags = ("--internal.executor_recycle_after", str(3 * JOBS // 10), "--internal.executor_profiles", '["stdlib"]')
    with running(*flags, "--internal.executor_check_s", "1000") as process:
        client = ExecutorClient(process.address)

        async def some(count: int) -> None:
            left = iter(range(count))

            async def ask() -> None:
                for number in left:
                    job = Job("open('/tmp/x', 'w').write(input())\nprint(open('/tmp/x').read())", stdin=str(number))
                    ended = await client.run(job)
                    assert (ended.outcome, ended.stdout) == (Outcome.FINISHED, f"{number}\n"), ended

            await asyncio.gather(*(ask() for _ in range(8)))

        idle = len(process.processes())
        await some(JOBS // 6)
        await until(lambda: len(process.processes()) <= idle)
        before = _held(process)
        await some(JOBS)
        await until(lambda: len(process.processes()) <= before["processes"])
        after = _held(process)
        await client.close()
        assert 'penstock_executor_zygote_restarts_total{profile="stdlib",reason="worn"} 3.0' in process.get("/metrics")
    assert after["processes"] == before["processes"]
    assert after["descriptors"] <= before["descriptors"] + 2
    assert after["files"] == before["files"]
    assert after["memory"] < before["memory"] + min(24 << 20, JOBS << 14)
    assert not Path(process.address.removeprefix("unix:")).exists()


def _held(executor: Running) -> dict[str, int]:
    processes = executor.processes()
    return {
        "processes": len(processes),
        "descriptors": processes[0].num_fds(),
        "memory": processes[0].memory_info().rss,
        "files": _owned(Path("/dev/shm")) + sum(1 for _ in executor.secret.parent.iterdir()),
    }


def test_an_executor_that_is_killed_leaves_no_process() -> None:
    need("bwrap", "bubblewrap")
    with running("--internal.executor_profiles", '["stdlib"]') as process:
        below = process.processes()[1:]
        assert below
        os.kill(process.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(below, timeout=PATIENCE_S)
        assert alive == []


# ---------------------------------------------------------------- penstock up


def test_up_starts_an_executor_only_where_a_scorer_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = plan.executor_address(Path("runs/a"))
    settings = Settings.model_validate({"run": {"id": "a"}, "reward": {"executor": {"address": address}}})
    environment = {"PATH": "/bin", "PENSTOCK__BUS__URL": "redis://:secret@host", "HF_TOKEN": "secret"}
    assert plan.executor(settings, tmp_path, environment) == []
    monkeypatch.setattr(Settings, "needs_executor", True)
    (actual,) = plan.executor(settings, tmp_path, environment)
    assert (actual.name, dict(actual.environment)) == ("executor", {"PATH": "/bin"})
    elsewhere = Settings.model_validate({"run": {"id": "a"}, "reward": {"executor": {"address": "executor:7000"}}})
    assert plan.executor(elsewhere, tmp_path, environment) == []


def _owned(folder: Path) -> int:
    """Files there of the programs' user, except those of parallel tests."""
    user = 65_534 if os.getuid() == 0 else os.getuid()
    count = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += path.stat().st_uid == user and not path.name.startswith(_OF_OTHERS)
    return count


async def test_an_executor_that_stops_is_lost_and_one_that_beats_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "SILENT_S", 0.2)
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(frames.pack({"beat": True}))
        number = (await frames.receive_async(reader))["id"]
        if len(connections) == 2:
            for _ in range(50):  # longer than SILENT_S, of which a busy machine may use up some
                await asyncio.sleep(0.05)
                writer.write(frames.pack({"beat": True}))
            writer.write(frames.pack(execution_frame(number, ENDED)))

    async with await asyncio.start_unix_server(accept, tmp_path / "socket"):
        client = ExecutorClient(f"unix:{tmp_path}/socket")
        with pytest.raises(TemporaryError, match=r"code executor at .*: nothing was received for 0\.2 s"):
            await client.run(Job("print(1)"))
        monkeypatch.setattr(executor_client, "SILENT_S", 2.0)
        assert await client.run(Job("print(1)")) == ENDED, "over another connection"
        assert len(connections) == 2
        await client.close()
        for writer in connections:
            writer.close()


async def test_an_executor_of_an_earlier_version_has_no_beat_and_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "SILENT_S", 0.05)
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        for _ in range(2):
            number = (await frames.receive_async(reader))["id"]
            await asyncio.sleep(0.2)
            writer.write(frames.pack(execution_frame(number, ENDED)))

    async with await asyncio.start_unix_server(accept, tmp_path / "socket"):
        client = ExecutorClient(f"unix:{tmp_path}/socket")
        assert [await client.run(Job("print(1)")) for _ in range(2)] == [ENDED, ENDED]
        await client.close()
        for writer in connections:
            writer.close()


async def test_an_executor_beats_while_its_client_may_send_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "BEAT_S", 0.02)

    class Busy:
        async def run(self, _: Job) -> Execution:
            await asyncio.Event().wait()
            return ENDED

    async with serve(Busy(), f"unix:{tmp_path}/socket", 1):  # type: ignore[arg-type]
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        for number in range(3):  # more than wait
            writer.write(frames.pack(job_frame(number, Job("print(1)"))))
        assert [await frames.receive_async(reader) for _ in range(20)] == [{"beat": True}] * 20
        writer.close()


async def test_a_connection_to_an_executor_whose_host_vanishes_breaks() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        _, writer = await ExecutorClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")._open()
        connection = writer.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENT_S
        writer.close()
