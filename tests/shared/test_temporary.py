"""Folders for temporary files are removed at the end, and after a kill by the next process."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import TypeAlias

import pytest

from penstock.shared.files import temporary
from tests.conftest import PATIENCE_S

OWNER = """
import os, sys, time
from penstock.shared.files import temporary
print(temporary.make("law"), flush=True)
if os.fork() == 0:
    sys.exit()  # a fork's exit removes nothing
os.wait()
print("waiting", flush=True)
sys.stdin.read()
"""

MAPPED = """
import sys
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # as if its process was killed, too
memory = shared_memory.SharedMemory(create=True, size=16)
print(memory.name, flush=True)
sys.stdin.read()
"""
NOTING = """
import sys
from penstock.shared.files import temporary
temporary.note_shared_memory(temporary.make("law"), [int(sys.argv[1])])
print("noted", flush=True)
sys.stdin.read()
"""
ENGINE = """
import os, signal, subprocess, sys
from penstock.services.rollout.engines.vllm.arguments import set_environment
set_environment()
engine = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
engine.stdout.readline()
os.kill(engine.pid, signal.SIGKILL)
engine.wait()
print(os.environ["VLLM_RPC_BASE_PATH"], flush=True)
sys.stdin.read()
"""
SOCKET = """
import zmq
from vllm.utils.network_utils import get_open_zmq_ipc_path
bound = zmq.Context().socket(zmq.PULL)
bound.bind(get_open_zmq_ipc_path())
print("bound", flush=True)
bound.recv()
"""
SOCKET_AT_THE_PATH = """
import os, uuid, zmq
bound = zmq.Context().socket(zmq.PULL)
bound.bind(f"ipc://{os.environ['VLLM_RPC_BASE_PATH']}/{uuid.uuid4()}")
print("bound", flush=True)
bound.recv()
"""
"""As vLLM's, without its import."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files, with a path as short as usual."""
    with tempfile.TemporaryDirectory(prefix="law-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
        yield Path(name)


Start: TypeAlias = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a script, whose process and pipes end with the test."""
    with contextlib.ExitStack() as processes:

        def started(script: str, *words: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", script, *words]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield started


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_a_living_one_has_is_not(
    start: Start, folder: Path
) -> None:
    killed, living = start(OWNER), start(OWNER)
    places = [Path(line(killed)), Path(line(living))]
    assert [line(killed), line(living)] == ["waiting"] * 2
    assert [path.stat().st_mode & 0o777 for path in places] == [0o700] * 2
    killed.send_signal(signal.SIGKILL)
    killed.wait(PATIENCE_S)
    assert places[0].exists()
    mine = temporary.make("mine")
    assert names(folder) == sorted((places[1].name, mine.name))
    living.communicate(timeout=PATIENCE_S)
    temporary.remove(mine)
    assert names(folder) == []


@pytest.mark.parametrize("end", ["remove", "kill"])
def test_shared_memory_of_killed_processes_is_removed_with_the_folder(start: Start, folder: Path, end: str) -> None:
    child = start(MAPPED)
    name = line(child)
    others = shared_memory.SharedMemory(create=True, size=16)
    try:
        owner = start(NOTING, str(child.pid))
        assert line(owner) == "noted"
        child.kill()
        child.wait(PATIENCE_S)
        assert Path("/dev/shm", name).exists()
        if end == "kill":
            owner.kill()
            owner.wait(PATIENCE_S)
            temporary.remove_abandoned()
        else:
            owner.communicate(timeout=PATIENCE_S)
        assert not Path("/dev/shm", name).exists()
        assert Path("/dev/shm", others.name).exists()
    finally:
        others.close()
        others.unlink()
    assert names(folder) == []


def test_what_is_not_of_a_dead_process_of_this_user_stays(folder: Path, tmp_path: Path) -> None:
    (tmp_path / temporary._OWNER).touch()
    (folder / "penstock-link").symlink_to(tmp_path)
    (folder / "penstock-unknown").mkdir()
    (folder / "penstock-file").touch()
    (folder / "other").mkdir()
    (folder / "other" / temporary._OWNER).touch()
    if os.getuid() == 0:
        (folder / "penstock-other-user").mkdir()
        (folder / "penstock-other-user" / temporary._OWNER).touch()
        os.chown(folder / "penstock-other-user", 12345, 12345)
    before = names(folder)
    temporary.remove_abandoned()
    assert names(folder) == before
    assert (tmp_path / temporary._OWNER).exists()


def test_an_old_socket_on_which_no_process_listens_is_removed(folder: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX) as young,
        socket.socket(socket.AF_UNIX) as left,
    ):
        for name, bound in (("listening", listening), ("young", young), ("left", left)):
            bound.bind(str(folder / f"penstock-executor-{name}"))
        listening.listen()
        for name in ("listening", "left"):
            os.utime(folder / f"penstock-executor-{name}", (0, time.time() - 2 * temporary._SOCKET_AGE_S))
        temporary.remove_abandoned()
    assert names(folder) == ["penstock-executor-listening", "penstock-executor-young"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
@pytest.mark.parametrize(("end", "socket"), [(signal.SIGTERM, SOCKET), (signal.SIGKILL, SOCKET_AT_THE_PATH)])
def test_sockets_of_a_killed_vllm_engine_do_not_stay(
    start: Start, folder: Path, end: signal.Signals, socket: str
) -> None:
    replica = start(ENGINE, socket)
    place = Path(line(replica))
    assert place.parent == folder
    assert len(list(place.glob("????????-????-*"))) == 1, "the engine was killed and left its socket"
    if end == signal.SIGKILL:
        replica.send_signal(signal.SIGKILL)
        replica.wait(PATIENCE_S)
        temporary.remove_abandoned()
    else:
        replica.communicate(timeout=PATIENCE_S)
    assert [name for name in names(folder) if name.startswith("penstock-")] == []


def test_a_folder_too_deep_for_vllms_sockets_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pytest.importorskip("penstock.services.rollout.engines.vllm.arguments")
    deep = folder / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(
        arguments.SettingsError, match=r"sockets have paths of at most 107 bytes.*set TMPDIR to a shorter one"
    ):
        arguments.set_environment()
    assert names(deep) == []
