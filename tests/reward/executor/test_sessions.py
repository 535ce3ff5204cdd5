"""Laws of sessions: one keeps its state from cell to cell, none reaches another, and what a program can do ends with it."""

import ast
import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import psutil
import pytest

from penstock.services.reward.executor.executor import Executor
from penstock.services.reward.executor.isolation import Interpreter, candidates
from penstock.services.reward.executor.slots import SESSIONS_PER_SLOT
from penstock.shared.errors import TemporaryError
from penstock.shared.executor.client import ExecutorClient, ExecutorSession
from penstock.shared.executor.protocol import Cell, Limits, Outcome
from tests.conftest import need, until
from tests.support import executor_attacks as attacks
from tests.support.executor_attacks import ATTACKS, Attack
from tests.support.executor_process import Running, running

STDLIB = ("--internal.executor_profiles", '["stdlib"]', "--internal.executor_check_s", "1000")
LIMITS = Limits(wall_s=30.0, cpu_s=60.0)
IN_SESSION = attacks.SEEN | {"descriptors": [0, 1, 2, 3, 4], "named input": "", "input": ""}
"""Its fourth descriptor is that of its own cells."""
OWN = {"uses descriptors that were left open": "4\n", "writes its own input by its name": "got 1\n"}
"""What else an attack may print: it reads its own cells, or writes to /dev/null, which is a session's input."""


@pytest.fixture(scope="module", params=("namespace", "landlock"))
def executor(request: pytest.FixtureRequest) -> Iterator[Running]:
    if request.param == "namespace":
        need("bwrap", "bubblewrap")
    with running("--reward.executor.isolation", request.param, "--reward.executor.slots", "1", *STDLIB) as process:
        yield process


@pytest.fixture
async def client(executor: Running) -> AsyncIterator[ExecutorClient]:
    made = ExecutorClient(executor.address)
    yield made
    await made.close()


def sessions(executor: Running) -> float:
    (line,) = [line for line in executor.get("/metrics").splitlines() if line.startswith("penstock_executor_sessions ")]
    return float(line.split()[1])


async def test_names_are_kept_from_cell_to_cell_and_seen_by_no_other_session(client: ExecutorClient) -> None:
    async with client.session("stdlib", LIMITS) as first, client.session("stdlib", LIMITS) as other:
        assert (await first.run("x = 20\nx + 1")).stdout == "21\n"
        assert (await first.run("def f(n):\n    return n + x\nprint('so')\nf(2)")).stdout == "so\n22\n"
        assert (await first.run("None")).stdout == ""
        stranger = await other.run("x")
        assert (stranger.outcome, stranger.exit_status) == (Outcome.RUNTIME_ERROR, None)
        assert stranger.stdout.endswith("NameError: name 'x' is not defined\n")
        assert (await first.run("f(3)")).stdout == "23\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "def f():\n    return 1 / 0\nf()",
            'Traceback (most recent call last):\n  File "cell 2", line 3, in <module>\n    f()\n'
            '  File "cell 2", line 2, in f\n    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero\n',
        ),
        ("x =", '  File "cell 2", line 1\n    x =\n       ^\nSyntaxError: invalid syntax\n'),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", None),
        ("input()", None),
        ("y = bytearray(10 << 30)", None),
        ("import sys; sys.stdout.close()", None),
    ],
)
async def test_what_a_cell_raises_is_its_text_and_ends_nothing(
    client: ExecutorClient, code: str, text: str | None
) -> None:
    async with client.session("stdlib", LIMITS) as session:
        await session.run("x = 7")
        ran = await session.run(code)
        assert ran.exit_status is None
        assert text is None or ran.stdout == text
        assert (await session.run("import os; os.write(1, str(x).encode()); None")).stdout == "7"


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("while True: pass", Outcome.TIMEOUT, "ran longer than 1 s"),
        ("print('x' * (2 << 20))", Outcome.OUTPUT_LIMIT, "wrote more than 1048576 bytes"),
        ("exit(3)", Outcome.RUNTIME_ERROR, "exit status 3"),
        ("import os; os._exit(0)", Outcome.FINISHED, ""),
        ("import ctypes; ctypes.string_at(0)", Outcome.RUNTIME_ERROR, "SIGSEGV"),
        ("import os; os.chroot('/tmp')", Outcome.FORBIDDEN, "killed by the kernel at a forbidden system call"),
    ],
)
async def test_a_cell_that_ends_its_session_is_told_and_the_next_one_begins_anew(
    client: ExecutorClient, code: str, outcome: Outcome, detail: str
) -> None:
    async with client.session("stdlib", Limits(wall_s=1.0, cpu_s=60.0)) as session:
        await session.run("x = 7")
        ran = await session.run(code)
        assert (ran.outcome, ran.detail) == (outcome, detail)
        assert ran.exit_status is not None
        assert "NameError" in (await session.run("x")).stdout
        assert (await session.run("x = 8\nx")).stdout == "8\n"


async def run_attack(session: ExecutorSession, executor: Running, attack: Attack) -> str:
    """Return what an attack printed, without the error that ended it."""
    prelude = attacks.prelude(executor.process.pid, str(executor.secret), executor.port)
    await session.run(prelude)
    ran = await session.run(f"{attack.code}\nNone")
    return ran.stdout.partition("Traceback (most recent call last)")[0]


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if not attack.calls], ids=lambda attack: attack.name.replace(" ", "-")
)
async def test_an_attack_gets_nothing_and_other_sessions_keep_their_state(
    executor: Running, client: ExecutorClient, attack: Attack
) -> None:
    async with client.session("stdlib", LIMITS) as victim:
        await victim.run("secret_of_mine = 42")
        async with client.session("stdlib", replace(attack.limits, wall_s=min(5.0, attack.wall_s))) as session:
            printed = await run_attack(session, executor, attack)
        if attack.prints is not None:
            assert printed in (attack.prints, OWN.get(attack.name))
        assert (await victim.run("secret_of_mine")).stdout == "42\n", "neither an attack nor its end touched it"
        async with client.session("stdlib", LIMITS) as later:
            await later.run(attacks.CLEAN)
            assert ast.literal_eval((await later.run("sees()")).stdout) == IN_SESSION
    assert executor.process.poll() is None
    assert executor.secret.read_text() == "of the host"
    assert executor.secret.stat().st_mode & 0o777 == 0o666


async def test_threads_of_a_cell_rest_until_the_next_one(client: ExecutorClient) -> None:
    busy = "import threading\ncount = 0\ndef work():\n  global count\n  while True: count += 1\n"
    async with client.session("stdlib", LIMITS) as session:
        await session.run(f"{busy}threading.Thread(target=work, daemon=True).start()")
        async with client.session("stdlib", LIMITS) as other:
            assert (await other.run("1 + 1")).stdout == "2\n", "in the only slot"
        assert int((await session.run("count")).stdout) > 0


async def test_sessions_end_with_their_clients(executor: Running) -> None:
    await until(lambda: sessions(executor) == 0)
    before = len(executor.processes())
    client = ExecutorClient(executor.address)
    async with client.session("stdlib", LIMITS) as session:
        await session.run("x = 1")
        running_cell = asyncio.create_task(session.run("import time; time.sleep(1000)"))
        await until(lambda: len(executor.processes()) == before + 1)
        assert sessions(executor) == 1
        await client.close()
        with pytest.raises(TemporaryError):
            await running_cell
        await until(lambda: len(executor.processes()) == before and sessions(executor) == 0)


async def test_a_session_that_is_left_makes_room_for_one_that_waits(executor: Running, client: ExecutorClient) -> None:
    await until(lambda: sessions(executor) == 0)
    held = [client.session("stdlib", LIMITS) for _ in range(SESSIONS_PER_SLOT)]
    opened = [await each.__aenter__() for each in held]
    assert {(await each.run("1")).stdout for each in opened} == {"1\n"}
    async with client.session("stdlib", LIMITS) as waiting:
        cell = asyncio.create_task(waiting.run("2"))
        assert not (await asyncio.wait([cell], timeout=0.3))[0]
        await held[0].__aexit__(None, None, None)
        assert (await cell).stdout == "2\n"
    for each in held[1:]:
        await each.__aexit__(None, None, None)
    await until(lambda: sessions(executor) == 0)


async def test_a_cell_that_is_cancelled_is_killed(executor: Running, client: ExecutorClient) -> None:
    async with client.session("stdlib", LIMITS) as session:
        await session.run("x = 1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await session.run("while True: pass")
        assert "NameError" in (await session.run("x")).stdout


def test_an_executor_that_is_killed_leaves_no_session() -> None:
    with running("--reward.executor.isolation", "landlock", *STDLIB) as process:

        async def lose() -> list[psutil.Process]:
            client = ExecutorClient(process.address)
            async with client.session("stdlib", LIMITS) as session:
                await session.run("x = 1")
                processes = process.processes()
                process.process.kill()
                process.process.wait()
                with pytest.raises(TemporaryError):
                    await session.run("x")
            await client.close()
            return processes

        _, alive = psutil.wait_procs(asyncio.run(lose())[1:], 60)
        assert not alive


async def test_a_session_outlives_the_replacement_of_its_warm_interpreter() -> None:
    (way,) = candidates("landlock", Interpreter.find(""), 0, 40)
    made = Executor(way, ("stdlib",), 1, recycle_after=2)
    session, other = made.session(), made.session()
    try:
        await made.run_cell(session, Cell(0, "x = 5"))
        for number in range(5):
            assert (await made.run_cell(other, Cell(1, f"{number}\nexit()"))).exit_status == 0
        assert (await made.run_cell(session, Cell(0, "x"))).stdout == "5\n"
    finally:
        await session.close()
        await other.close()
        await made.close()


async def test_a_session_whose_warm_interpreter_dies_is_lost_and_no_answer() -> None:
    (way,) = candidates("landlock", Interpreter.find(""), 0, 40)
    others = set(psutil.Process().children())
    made = Executor(way, ("stdlib",), 1, recycle_after=100)
    session = made.session()
    try:
        await made.run_cell(session, Cell(0, "x = 5"))
        ours = [child for child in psutil.Process().children() if child not in others and child.is_running()]
        (zygote,) = [child for child in ours if "inside.zygote" in " ".join(child.cmdline())]
        zygote.kill()
        ran = await made.run_cell(session, Cell(0, "x"))
        assert ran.outcome is Outcome.SANDBOX_ERROR, "so the client redoes the episode"
    finally:
        await session.close()
        await made.close()
