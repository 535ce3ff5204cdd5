"""Processes forked from one that has imported large libraries, and nothing else: no thread, no socket, no GPU.

::

    start(modules) ──▶ server: imports them, while this process does other work
    Context().Process(…).start() ──▶ server forks: no import again, but this process's environment as of the start
    call(function)               ──▶ the same, and its result comes back

A forked process ends with the one that started it, and the server with the last of both.
"""

import os
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, TypeVar

T = TypeVar("T")

_started = False
_forked_from = 0


def is_started() -> bool:
    return _started


def start(modules: Sequence[str]) -> None:
    """Start the server, which imports ``modules`` in the background; one that runs already stays."""
    global _started
    _started = True
    forkserver.set_forkserver_preload(list(modules))
    forkserver.ensure_running()


def forked_from() -> int:
    """Return the server that this process was forked from; 0 if it was not."""
    return _forked_from


class _Process(ForkServerProcess):
    _environment: dict[str, str]
    _started_by: int

    def start(self) -> None:
        self._environment, self._started_by = dict(os.environ), os.getpid()
        super().start()

    def run(self) -> None:
        global _forked_from
        _forked_from = os.getppid()
        _end_with(self._started_by)
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


def _end_with(pid: int) -> None:
    """End this process when ``pid`` does; the kernel's signal for that (``die_with``) is for a parent's end only."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_after, args=(handle,), name="starter watch", daemon=True).start()


def _end_after(handle: int) -> None:
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    ended.poll()
    os._exit(1)


class Context(ForkServerContext):
    """A multiprocessing context of the server's processes."""

    Process = _Process


def call(function: Callable[[], T]) -> T:
    """Return the result of ``function``, or raise its error, from a forked process; closures are allowed."""
    import cloudpickle  # vLLM's

    with ProcessPoolExecutor(1, mp_context=Context()) as executor:
        result: T = executor.submit(_call, cloudpickle.dumps(function)).result()
        return result


def _call(pickled: bytes) -> Any:
    import cloudpickle

    return cloudpickle.loads(pickled)()
