"""Services that begin as forks of a process which has imported what is heavy; for tests that are about something else than starting.

::

    test ── module, arguments, environment; output and a pipe, by descriptor ──▶ forge ──fork──▶ the service
      ◀────────── its pid; through the pipe: how it ended, or that the forge is gone ──┘

torch, transformers, DeepSpeed and the web framework are 5 to 8 of the 7 to 10 seconds of processor that a service's start costs; a fork costs
a tenth of one. What began so is a process like any other: its pid, what it runs, signals and exit codes are real. It differs
from ``python -m services.…`` in what it has imported already and in what ``ps`` shows. `penstock up` and torchrun that began so fork their
services and ranks likewise, as their parents; other programs are started as ever.

The forge imports libraries and no service: what those declare when they are imported (metrics) stays their own. It has one thread.
"""

import asyncio
import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from shared.importing import importing
from shared.parent import die_with

ROOT = Path(__file__).parent.parent
_IMPORTED = (
    "deepspeed", "fastapi", "httpx", "peft", "safetensors.torch", "shared.service", "transformers.models.auto.modeling_auto",
    "torch.distributed.run", "transformers.models.auto.tokenization_auto", "transformers.models.qwen2.modeling_qwen2", "typer", "uvicorn",
)  # fmt: skip
_FORKED = tuple(f"services.{name}" for name in ("coordinator", "rollout", "reward", "trainer"))
_MESSAGE_BYTES = 1 << 18
_RUN_S = 800.0
_open_files: frozenset[int] = frozenset()
"""The descriptors that libraries opened when they were imported: a fork keeps these, and its three."""


class Forked:
    """A process that the forge became; what tests use of ``subprocess.Popen``."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended
        self._reads = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._reads:
            if self.returncode is None:
                self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)  # without its parent it was killed
            return self.returncode

    def __del__(self) -> None:
        os.close(self._ended)

    def send_signal(self, number: int) -> None:
        """Signal the process, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = Forked | subprocess.Popen[Any]


def start(
    module: str, arguments: Sequence[object], output: IO[Any], *, forked: bool = True, **environment: str
) -> Started:
    """Begin ``python -m module …`` as the leader of a session of its own; with ``forked`` false, as anybody would.

    Its environment is that of this process with ``environment``, and it writes to ``output``.
    """
    words, environment = [str(word) for word in arguments], {**os.environ, **environment}
    if not forked:
        command = [sys.executable, "-m", module, *words]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    job = {"module": module, "arguments": words, "environment": environment}
    ended, tells = os.pipe()
    link = _forge()
    socket.send_fds(link, [json.dumps(job).encode()], [output.fileno(), tells])
    os.close(tells)
    return Forked(int(link.recv(_MESSAGE_BYTES)), ended)


async def up(words: Sequence[object], output: Path, *, forked: bool = True) -> None:
    """Let `penstock up` do a whole run, which must succeed; what it says is written to ``output``."""
    with output.open("w") as file:
        process = start("services", ["up", *words], file, forked=forked)
    try:
        code = await asyncio.to_thread(process.wait, _RUN_S)
    finally:
        process.terminate()
    assert code == 0, output.read_text()


@functools.cache
def _forge() -> socket.socket:
    """Return the way to the forge of this process; it ends when the other end does."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen([sys.executable, "-m", "tests.forge", str(its.fileno())], cwd=ROOT, pass_fds=[its.fileno()])
    its.close()
    return ours


# ---------------------------------------------------------------- the forge


def serve(link: socket.socket) -> None:
    """Fork whatever is asked for, and tell how it ended, until nobody asks any more."""
    running: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is not link:
                    pid, tells = running.pop(key.fd)
                    os.write(tells, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    os.close(tells)
                    continue
                message, descriptors, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 2)
                if not message:
                    return
                job, (output, tells) = json.loads(message), descriptors
                pid = fork([job["module"], *job["arguments"]], job["environment"], output)
                watched = os.pidfd_open(pid)
                running[watched] = (pid, tells)
                ready.register(watched, selectors.EVENT_READ)
                os.close(output)
                link.send(str(pid).encode())


def fork(command: Sequence[str], environment: Mapping[str, str], output: int) -> int:
    """Fork the process of a module and its arguments, which ends with this one; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(parent, command, environment, output)
    return pid


def _become(parent: int, command: Sequence[str], environment: Mapping[str, str], output: int) -> NoReturn:
    """Be what ``python -m`` would be, from the start to the end."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not die_with(parent, signal.SIGTERM):
            os._exit(1)
        signal.set_wakeup_fd(-1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for descriptor in _descriptors() - _open_files - {0, 1, 2}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = command[1:]
        _forking()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forking() -> None:
    """Let what starts ``python -m`` of a service in this process fork it: `penstock up`, torchrun, and the trainer that becomes torchrun."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from services.up.process import Child

    ordinary = Child._start

    async def start_service(self: Child, log: IO[bytes]) -> Any:
        if (command := _module(self.plan.command)) is None:
            return await ordinary(self, log)  # type: ignore[arg-type]
        return _OfUp(fork(command, self.plan.environment, log.fileno()))

    def start_rank(_: SubprocessHandler, words: Sequence[str], environment: Mapping[str, str]) -> _OfTorchrun:
        command = _module(words)
        assert command is not None, words
        return _OfTorchrun(fork(command, environment, sys.stderr.fileno()))

    def become(python: str, words: Sequence[str]) -> NoReturn:
        sys.argv[1:] = words[3:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        sys.exit()

    Child._start = start_service  # type: ignore[method-assign]
    SubprocessHandler._popen = start_rank  # type: ignore[assignment,method-assign]
    os.execv = become  # type: ignore[assignment]


def _module(words: Sequence[str]) -> list[str] | None:
    """Return a service's module and arguments where ``words`` start one that may be forked, else None."""
    *options, module = words[1 : words.index("-m") + 2] if "-m" in words else [""]
    forked = words[0] == sys.executable and module in _FORKED and set(options) <= {"-u", "-m"}
    return list(words[len(options) + 1 :]) if forked else None


def _descriptors() -> frozenset[int]:
    return frozenset(int(path.name) for path in Path("/proc/self/fd").iterdir())


class _OfUp:
    """A fork whose parent is `penstock up`; what that uses of ``asyncio.subprocess.Process``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watched = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._watched, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        self._ended.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self._ended.done():
            raise ProcessLookupError
        os.kill(self.pid, number)


class _OfTorchrun(subprocess.Popen[bytes]):
    """A fork whose parent is torchrun: what ``subprocess.Popen`` is after its start."""

    def __init__(self, pid: int) -> None:
        self._execute_child = lambda *_: self.__dict__.update(pid=pid, _child_created=True)
        super().__init__(["fork"])


if __name__ == "__main__":
    from tests import forge  # what a fork runs is `__main__`

    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported
    with importing():
        for name in _IMPORTED:
            importlib.import_module(name)
    forge._open_files = forge._descriptors() - {int(sys.argv[1])}
    forge.serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # no library needs to be taken down
