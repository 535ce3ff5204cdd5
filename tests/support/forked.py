"""Turn a fork of a process with preloaded imports into ``python -m services.…``, and let its children fork likewise.

It differs from the real command only in imports and in ``ps``. `penstock up` and the trainer's launcher fork their
services and ranks, a replica with vLLM the server of its engines; other programs start as usual.
"""

import asyncio
import atexit
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import IO, Any, NoReturn

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from penstock.shared.process.parent import die_with

_SERVICES = tuple(f"penstock.services.{name}" for name in ("coordinator", "episodes", "rollout", "reward", "trainer"))
_RANKS = tuple(f"tests.support.{name}_ranks" for name in ("expert", "expert_row", "sharing", "split", "trainer"))
_spawn = util.spawnv_passfds
_kept: frozenset[int] = frozenset({0, 1, 2})
"""Descriptors that forks keep: standard ones and those opened by libraries on import."""
_metrics: list[tuple[str, Collector]] = []
"""Of services that were imported before forks, with the module of each."""


@contextlib.contextmanager
def setting_metrics_aside() -> Iterator[None]:
    """Register no metric of a service that is imported in the body; its forks do."""
    register = REGISTRY.register

    def set_aside(collector: Collector) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and not frame.f_globals["__name__"].startswith("penstock."):
            frame = frame.f_back
        module = frame.f_globals["__name__"]
        if module.startswith("penstock.services."):
            _metrics.append((module, collector))
        else:
            register(collector)

    REGISTRY.register = set_aside  # type: ignore[method-assign]
    try:
        yield
    finally:
        REGISTRY.register = register  # type: ignore[method-assign]


def _register_metrics(service: str) -> None:
    """Register the metrics of a service alone; of a program of the tests, which may import any, those of all."""
    own = f"{service}." if service.startswith("penstock.services.") else ""
    for module, collector in [each for each in _metrics if each[0].startswith(own)]:
        REGISTRY.register(collector)
        _metrics.remove((module, collector))  # its own forks have it


def keep_open(but: set[int]) -> None:
    global _kept
    _kept |= _open() - but


def close_but(*descriptors: int) -> None:
    """Close what forks do not keep, except ``descriptors``."""
    for descriptor in _open() - _kept - set(descriptors):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _open() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def fork(command: Sequence[str], environment: Mapping[str, str], output: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(parent, command, environment, output)
    return pid


def _become(parent: int, command: Sequence[str], environment: Mapping[str, str], output: int) -> NoReturn:
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
        close_but()
        for inherited in weakref.finalize._registry.values():  # type: ignore[attr-defined]
            inherited.atexit = False  # the parent's: hundreds of torch, which take 0.05 s, and folders that it deletes
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = command[1:]
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in paths if path and path not in sys.path]
        if (let_fork := _LET_FORK.get(command[0])) is not None:
            let_fork()
        _register_metrics(command[0])
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


def _let_up_fork() -> None:
    """Let this process, as `penstock up`, fork its services."""
    from penstock.services.up.process import Child

    ordinary = Child._start

    async def begin(self: Child, log: IO[bytes]) -> Any:
        if (command := _module(self.plan.command)) is None:
            return await ordinary(self, log)  # type: ignore[arg-type]
        return _OfUp(fork(command, self.plan.environment, log.fileno()))

    Child._start = begin  # type: ignore[method-assign]


def _let_trainer_fork() -> None:
    """Let this process, as the trainer, fork its ranks if it launches several."""
    from penstock.services.trainer import launcher

    def begin(words: Sequence[str], variables: Mapping[str, str]) -> _OfLauncher:
        command = _module(words)
        assert command is not None, words
        return _OfLauncher(fork(command, variables, sys.stderr.fileno()))

    launcher.start_process = begin


def _let_replica_fork() -> None:
    """Let this process, as a replica, fork its vLLM engines from a server that is a fork itself, as a GPU's are."""
    if "vllm" in sys.modules:
        from penstock.services.rollout.engines import fork_server
        from penstock.services.rollout.engines.vllm.start import PRELOADED

        resource_tracker.ensure_running()
        util.spawnv_passfds = _fork_server  # type: ignore[assignment]
        fork_server.start(PRELOADED)
        util.spawnv_passfds = _spawn


def _fork_server(_: bytes, words: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Run the code of ``python -c …`` in a fork of this process; engines that it starts fork their ranks."""
    from vllm.v1.executor import multiproc_executor

    pid = os.fork()
    if pid == 0:
        try:
            multiproc_executor.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
            close_but(*descriptors)
            util.spawnv_passfds = _spawn
            exec(words[-1], {})
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


_LET_FORK = {
    "penstock.services.cli": _let_up_fork,
    "penstock.services.rollout": _let_replica_fork,
    "penstock.services.trainer": _let_trainer_fork,
    "tests.support.launched_ranks": _let_trainer_fork,
}


def _module(words: Sequence[str]) -> list[str] | None:
    *options, module = words[1 : words.index("-m") + 2] if "-m" in words else [""]
    forked = words[0] == sys.executable and module in (*_SERVICES, *_RANKS) and set(options) <= {"-u", "-m"}
    return list(words[len(options) + 1 :]) if forked else None


class _NoPipes:
    """The transport of a child without pipes."""

    def get_pipe_transport(self, descriptor: int) -> None:
        return None

    def close(self) -> None:
        return None


class _OfUp:
    """A child of `penstock up`, with the parts of ``asyncio.subprocess.Process`` that it uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._transport = _NoPipes()
        self._watched = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._watched, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        self._ended.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None


class _OfLauncher(subprocess.Popen[bytes]):
    """A child of the launcher: a started ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self._execute_child = lambda *_: self.__dict__.update(pid=pid, _child_created=True)
        super().__init__(["fork"])
