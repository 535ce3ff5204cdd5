"""Killable processes, with a program that does what a question says."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import REGISTRY

from penstock.services.reward.scorers.answer.scorer import COMMAND
from penstock.services.reward.subprocess_pool import pool as processes
from penstock.services.reward.subprocess_pool.pool import Crashed, NotReady, Overdue, Processes, Share, _Place
from penstock.services.up.process_tree import is_alive
from penstock.shared.errors import TemporaryError
from tests.conftest import PATIENCE_S, until

PROGRAM = """
import json, os, pathlib, sys, time
print('{"ready": true}', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    first = not pathlib.Path(question["seen"]).exists()
    pathlib.Path(question["seen"]).write_text(str(os.getpid()))
    do = question["do"] if first or not question.get("once") else "answer"
    if do == "hang":
        time.sleep(600)
    elif do == "die":
        os._exit(3)
    elif do == "babble":
        print("no JSON", flush=True)
    else:
        print(json.dumps({"pid": os.getpid(), "environment": sorted(os.environ)}), flush=True)
"""
LONG_S = PATIENCE_S
RESTARTS = "penstock_reward_process_restarts_total"


@pytest.fixture
async def pool() -> AsyncIterator[Processes]:
    processes = Processes([sys.executable, "-c", PROGRAM], 1, "stub")
    await processes.warm()
    yield processes
    await processes.close()


async def test_a_late_process_is_killed_and_a_fresh_one_answers_the_next_question(
    pool: Processes, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    with pytest.raises(Overdue, match=r"no answer within 0\.3 s"):
        await pool.ask({"do": "hang", "seen": str(seen)}, 0.3)
    answer = await pool.ask({"do": "answer", "seen": str(tmp_path / "other")}, LONG_S)
    if seen.exists() and (late := seen.read_text()):  # it may have been killed before it read the question
        assert answer["pid"] != int(late)
        assert not psutil.pid_exists(int(late))


async def test_a_question_that_finds_its_process_dead_is_asked_again(pool: Processes, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    asking = asyncio.create_task(pool.ask({"do": "hang", "once": True, "seen": str(seen)}, LONG_S))
    await until(lambda: seen.exists() and seen.read_text())
    killed = int(seen.read_text())
    os.kill(killed, signal.SIGKILL)
    assert (await asking)["pid"] != killed


def _overdue() -> float:
    """Return how many questions have run into their deadline."""
    return REGISTRY.get_sample_value(RESTARTS, {"scorer": "stub", "reason": "overdue"}) or 0.0


async def test_questions_that_run_into_their_deadline_delay_those_of_others_by_one(
    pool: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=_overdue))  # others take no time on this clock
    ended = list[str]()

    async def ask(share: Share, name: str, do: str, timeout_s: float) -> None:
        with contextlib.suppress(Overdue):
            await pool.ask({"do": do, "seen": str(tmp_path / "seen")}, timeout_s, share)
        ended.append(name)

    hostile, honest = Share(), Share()
    async with asyncio.TaskGroup() as asking:
        for _ in range(3):
            asking.create_task(ask(hostile, "hostile", "hang", 0.3))
        await until(lambda: pool.questions == 1)
        for _ in range(2):
            asking.create_task(ask(honest, "honest", "answer", LONG_S))
    assert ended == ["hostile", "honest", "honest", "hostile", "hostile"]


async def test_the_start_of_a_process_is_no_time_of_the_question_that_waits_for_it(
    pool: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, fill = 0.0, _Place.fill

    async def slow(place: _Place) -> None:
        nonlocal now_s
        now_s += 0.0 if place.alive else 100.0
        await fill(place)

    monkeypatch.setattr(_Place, "fill", slow)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now_s))
    with pytest.raises(Overdue):
        await pool.ask({"do": "hang", "seen": str(tmp_path / "seen")}, 0.3)
    await pool.ask({"do": "answer", "seen": str(tmp_path / "seen")}, LONG_S, honest := Share())
    assert (now_s, honest.used_s) == (100.0, 0.0)


async def test_an_asker_that_leaves_the_queue_keeps_no_process(pool: Processes, tmp_path: Path) -> None:
    seen = str(tmp_path / "seen")
    asking = [asyncio.create_task(pool.ask({"do": "hang", "seen": seen}, LONG_S)) for _ in range(3)]
    await until(lambda: pool.questions == 1)
    for task in reversed(asking):
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert "pid" in await pool.ask({"do": "answer", "seen": seen}, LONG_S)
    assert pool.questions == 2


@pytest.mark.parametrize("deed", ["die", "babble"])
async def test_a_question_that_kills_two_processes_is_to_blame(pool: Processes, tmp_path: Path, deed: str) -> None:
    with pytest.raises(Crashed, match="two processes died"):
        await pool.ask({"do": deed, "seen": str(tmp_path / "seen")}, LONG_S)
    assert "pid" in await pool.ask({"do": "answer", "seen": str(tmp_path / "seen")}, LONG_S)


async def test_a_question_whose_asker_left_frees_its_process(pool: Processes, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    asking = asyncio.create_task(pool.ask({"do": "hang", "seen": str(seen)}, LONG_S))
    await until(lambda: seen.exists() and seen.read_text())
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    left = int(seen.read_text())
    assert (await pool.ask({"do": "answer", "seen": str(seen)}, LONG_S))["pid"] != left
    assert not psutil.pid_exists(left)
    assert pool.alive == 1


async def test_a_program_that_cannot_start_is_tried_again_with_the_next_question(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    pool = Processes([sys.executable, str(program)], 1, "stub")
    for _ in range(2):
        with pytest.raises(TemporaryError, match=f"a process was not ready within {PATIENCE_S:.0f} s"):
            await pool.ask({"do": "answer", "seen": str(tmp_path / "seen")}, LONG_S)
    program.write_text(PROGRAM)
    assert "pid" in await pool.ask({"do": "answer", "seen": str(tmp_path / "seen")}, LONG_S)
    await pool.close()


async def test_a_process_that_says_why_it_cannot_begin_is_quoted() -> None:
    refusal = """import json; print(json.dumps({"ready": False, "error": "no schema"}), flush=True)"""
    pool = Processes([sys.executable, "-c", refusal], 2, "stub")
    with pytest.raises(NotReady, match="no schema"):
        await pool.warm()
    assert pool.alive == 0


async def test_as_many_questions_run_at_once_as_there_are_processes(tmp_path: Path) -> None:
    pool = Processes([sys.executable, "-c", PROGRAM], 2, "stub")
    await pool.warm()
    seen = [tmp_path / name for name in ("a", "b")]
    asking = [asyncio.create_task(pool.ask({"do": "hang", "seen": str(path)}, LONG_S)) for path in seen]
    await until(lambda: all(path.exists() and path.read_text() for path in seen))
    assert len({path.read_text() for path in seen}) == 2
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await pool.close()


async def test_a_worn_process_is_replaced(pool: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WORN_AFTER_QUESTIONS", 2)
    pids = [(await pool.ask({"do": "answer", "seen": str(tmp_path / "x")}, LONG_S))["pid"] for _ in range(4)]
    assert pids[0] == pids[1]
    assert pids[1] != pids[2]
    assert pids[2] == pids[3]


async def test_a_process_inherits_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK__BUS__URL", "redis://:secret@host")
    pool = Processes([sys.executable, "-c", PROGRAM], 1, "stub")
    answer = await pool.ask({"do": "answer", "seen": str(tmp_path / "seen")}, LONG_S)
    await pool.close()
    environment = answer["environment"]
    assert isinstance(environment, list)
    assert "PENSTOCK__BUS__URL" not in environment
    assert "PATH" in environment


COMPUTING = """
import os, sys
from penstock.services.reward.subprocess_pool import child
def answer(question):
    while question["do"] == "compute": pass
    if question["do"] == "die": os._exit(3)
    return {"pid": os.getpid(), "parent": os.getppid()}
child.serve(lambda: answer, int(sys.argv[1]), computes=True)
"""


@pytest.fixture
async def computing() -> AsyncIterator[Processes]:
    processes = Processes([sys.executable, "-c", COMPUTING], 1, "stub", computes=True)
    await processes.warm()
    yield processes
    await processes.close()


async def test_a_worker_that_computes_too_long_is_killed_and_a_fork_of_what_is_loaded_goes_on(
    computing: Processes,
) -> None:
    before = await computing.ask({"do": "answer"}, LONG_S)
    with pytest.raises(Overdue, match=r"no answer within 0\.2 s"):
        await computing.ask({"do": "compute"}, 0.2)
    after = await computing.ask({"do": "answer"}, LONG_S)
    assert (after["parent"], after["pid"] == before["pid"]) == (before["parent"], False)


async def test_a_worker_that_dies_takes_its_process_with_it(computing: Processes) -> None:
    before = await computing.ask({"do": "answer"}, LONG_S)
    with pytest.raises(Crashed, match="two processes died"):
        await computing.ask({"do": "die"}, LONG_S)
    assert (await computing.ask({"do": "answer"}, LONG_S))["parent"] != before["parent"]
    await computing.close()
    await until(lambda: not psutil.pid_exists(int(str(before["pid"]))))  # its parent is dead, so init waits for it


KILLED_PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([*sys.argv[1:], str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
child.stdin.write(b'{"reference": "x=46", "answer": "' + b'1e1/' * 40 + b'7"}\\n')
child.stdin.flush()
print(child.pid, flush=True)
time.sleep(600)
"""


def _start_parent() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", KILLED_PARENT, *COMMAND], stdout=subprocess.PIPE, text=True)


async def test_a_matcher_that_computes_for_ever_dies_with_its_service() -> None:
    parent = _start_parent()
    assert parent.stdout is not None
    child = int(await asyncio.to_thread(parent.stdout.readline))
    parent.kill()
    parent.wait(PATIENCE_S)
    parent.stdout.close()
    await until(lambda: not is_alive(child))


async def test_an_answer_that_came_with_a_cancellation_is_nobody_elses(pool: Processes, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    first = asyncio.create_task(pool.ask({"do": "hang", "seen": str(seen)}, LONG_S))
    await until(lambda: seen.exists() and seen.read_text())
    second = asyncio.create_task(pool.ask({"do": "answer", "seen": str(tmp_path / "other")}, LONG_S))
    await asyncio.sleep(0)
    process = pool._places[0]._process
    assert process is not None
    assert process.stdout is not None
    process.stdout.feed_data(b'{"of": "the first"}\n')  # its answer, at the moment of
    first.cancel()
    assert (await second)["pid"] not in (process.pid, int(seen.read_text()))
