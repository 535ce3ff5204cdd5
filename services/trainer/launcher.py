"""Start this host's ranks of a trainer and end them together.

::

    launcher ──▶ rank 0 … n-1         RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE in their environment
       ▲            │
       │            ├─ all ended with 0 ─▶ 0
       │            └─ one ended otherwise ─▶ the others are killed ─▶ its exit code (128 + its signal)
    SIGTERM, SIGINT ─▶ forwarded to the host's first rank; rank 0 then stops all ranks in order
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.shared.files import temporary
from penstock.shared.settings import TrainerSettings

log = logging.getLogger(__name__)

LAUNCHER = "PENSTOCK_LAUNCHER_PID"
RANKS_STORE = "PENSTOCK_RANKS_STORE"
_POLL_S, _KILLED_S = 0.1, 10.0
_STOP_S = 15.0
"""After ``bus.drain_s``, ranks are killed."""


def launch(command: Sequence[str], trainer: TrainerSettings, drain_s: float) -> int:
    """``drain_s``: rank 0's time to finish after a stop signal."""
    with temporary.made("ranks") as folder:
        ranks = Ranks(drain_s + _STOP_S)
        with ranks.forwarding_signals():
            for local in range(trainer.ranks):
                ranks.start(command, environment(trainer, local, folder / "store"))
            return ranks.wait()


def environment(trainer: TrainerSettings, local: int, store: Path) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if trainer.offload != "none" else 0  # for the optimizer's update
    threads = {} if trainer.ranks == 1 else {"OMP_NUM_THREADS": str(max(1, cores // trainer.ranks))}
    return {
        **threads,
        **os.environ,
        "RANK": str(trainer.node * trainer.ranks + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(trainer.nodes * trainer.ranks),
        "LOCAL_WORLD_SIZE": str(trainer.ranks),
        LAUNCHER: str(os.getpid()),
        RANKS_STORE: str(store),
    }


class Ranks:
    """Processes that live and die together; after a stop signal they have ``stop_s`` left."""

    def __init__(self, stop_s: float) -> None:
        self._stop_s = stop_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._told = 0
        self._ends_at_s = float("inf")

    def start(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        if not self._told:
            self._processes.append(start_process(words, variables))

    def wait(self) -> int:
        """Wait for all; return the first nonzero exit code, or 0."""
        try:
            while (running := [rank for rank in self._processes if rank.poll() is None]) and not self._failed():
                if time.monotonic() > self._ends_at_s:
                    log.error("killed ranks that did not stop", extra={"ranks": len(running)})
                    break
                time.sleep(_POLL_S)
            code = self._failed()
            if running and code and not self._told:
                log.error("a rank ended: stopping the others", extra={"exit_code": code})
            in_order = self._processes and not code and not running
            return 0 if in_order else 128 - code if code < 0 else max(code, 1)
        finally:
            self._kill()

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._tell) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self, number: int, _: object) -> None:
        if not self._told:
            self._told, self._ends_at_s = number, time.monotonic() + self._stop_s
        for process in self._processes[:1]:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def _failed(self) -> int:
        return next((rank.returncode for rank in self._processes if rank.poll()), 0)

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # left to the supervisor
                process.wait(_KILLED_S)


def start_process(words: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, env=dict(variables))
