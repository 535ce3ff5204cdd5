"""The warm interpreter: imports common modules and forks a confined child per program.

::

    supervisor ── {id, bounds, core} + [payload, stdin, stdout, report] ──▶ zygote ── fork ──▶ child: confine, run
               ── {kill: id}, {suspend: id}, {resume: id}, {ask: id}    ──▶
               ◀── {ready: true, base_bytes}                                     once
               ◀── {id, charged_s, held_s, resident_bytes}                       the answer, while the child exists
               ◀── {id, status, wall_s, cpu_s, peak_bytes}                       at the child's end; its wait status

Single-threaded; reads nothing that a program wrote. Messages are one JSON packet each; programs and inputs are sealed
memory files, so nothing blocks. When the socket closes it kills its children and exits; in tier ``namespace`` each
child leads a PID namespace, so its descendants die too.
"""

import contextlib
import dataclasses
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib.machinery import FileFinder
from typing import Any, NoReturn

from . import (
    comparison,  # noqa: F401 (jobs of the code scorer import it, and later nothing can read its file)
    confinement,
    runner,
    waiting,
)

_PACKET_BYTES = 1 << 16
_STACK_BYTES = 4 << 20
"""The maximum number of threads takes half of 256 MiB."""
_WARM = """
abc argparse array ast asyncio base64 bisect calendar cmath collections collections.abc contextlib copy csv ctypes dataclasses datetime
decimal difflib enum fractions functools gc glob hashlib heapq html inspect io itertools json linecache locale logging math numbers
operator os pathlib pickle pprint queue random re secrets shutil signal statistics string struct sys tempfile textwrap threading time
timeit traceback types typing unicodedata unittest uuid warnings zlib encodings.idna
""".split()  # noqa: SIM905


@dataclasses.dataclass(slots=True)
class ForkedProgram:
    number: int
    """Of its job."""
    pid: int
    started_s: float
    suspended_s: float = 0.0
    suspended_since_s: float | None = None

    def suspend(self, watched: int) -> None:
        signal.pidfd_send_signal(watched, signal.SIGSTOP)
        self.suspended_since_s = self.suspended_since_s or time.monotonic()

    def resume(self, watched: int) -> None:
        self.suspended_s = time.monotonic() - self.started_s - self.held_s()
        self.suspended_since_s = None
        signal.pidfd_send_signal(watched, signal.SIGCONT)

    def held_s(self) -> float:
        return (self.suspended_since_s or time.monotonic()) - self.started_s - self.suspended_s


class Zygote:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._how = confinement.Confinement(settings["tier"], tuple(settings["readable"]), settings["threads"])
        if self._how.tier == "landlock":
            ruleset = confinement.make_ruleset(self._how.readable, settings["hidden"])
            self._how = dataclasses.replace(self._how, ruleset=_moved_up(ruleset))
            os.close(ruleset)
        self._control = socket.socket(fileno=settings["control"])
        self._pid = os.getpid()
        self._poll = select.poll()
        self._children: dict[int, ForkedProgram] = {}
        """By pid descriptor."""
        self._own_pids = -1
        self._profile = settings["profile"]
        if self._how.tier == "namespace":
            self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._base_bytes = _address_space()

    def run(self) -> None:
        self._poll.register(self._control, select.POLLIN)
        self._say({"ready": True, "base_bytes": self._base_bytes})
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._control.fileno():
                    self._reap(descriptor)
                elif not self._hear():
                    return

    def _say(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _hear(self) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 4)
        if not packet:
            return False
        message = json.loads(packet)
        if "bounds" not in message:
            self._obey(*message.popitem())
            return True
        try:
            self._start(message, descriptors)
        except OSError as error:
            self._say({"id": message["id"], "error": str(error)})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        started_s = time.monotonic()
        if self._own_pids >= 0:
            confinement.unshare(confinement.NEW_PID)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_program(message, descriptors)
        finally:
            if self._own_pids >= 0:
                confinement.enter(self._own_pids, confinement.NEW_PID)
        watched = os.pidfd_open(pid)
        self._children[watched] = ForkedProgram(message["id"], pid, started_s)
        self._poll.register(watched, select.POLLIN)

    def _obey(self, verb: str, number: int) -> None:
        for watched, child in self._children.items():
            if child.number != number:
                continue
            with contextlib.suppress(ProcessLookupError):
                match verb:
                    case "kill":
                        signal.pidfd_send_signal(watched, signal.SIGKILL)
                    case "suspend":
                        child.suspend(watched)
                    case "resume":
                        child.resume(watched)
                    case "ask":
                        self._report_usage(watched, child)

    def _report_usage(self, watched: int, child: ForkedProgram) -> None:
        held_s = child.held_s()
        self._say(
            {
                "id": child.number,
                "charged_s": held_s - waiting.waited_s(watched),
                "held_s": held_s,
                "resident_bytes": waiting.resident_bytes(watched),
            }
        )

    def _reap(self, watched: int) -> None:
        child = self._children.pop(watched)
        self._poll.unregister(watched)
        os.close(watched)
        _, status, used = os.wait4(child.pid, 0)
        self._say(
            {
                "id": child.number,
                "status": os.waitstatus_to_exitcode(status),
                "wall_s": child.held_s(),
                "cpu_s": used.ru_utime + used.ru_stime,
                "peak_bytes": used.ru_maxrss * 1024,
            }
        )

    def _become_program(self, message: dict[str, Any], descriptors: list[int]) -> NoReturn:
        report = descriptors[3]
        try:
            _settle_down(message["core"])
            payload = _read_all(descriptors[0])
            nothing = os.open("/dev/null", os.O_WRONLY)  # own description: its flags last as long as it does
            _arrange((*descriptors[1:3], nothing, report), self._how.ruleset)
            report = runner.REPORT
            job = json.loads(payload)
            if self._profile == "numpy":
                importlib.import_module("numpy").random.seed()
            bounds = message["bounds"] | {"memory_bytes": message["bounds"]["memory_bytes"] + self._base_bytes}
            signal.set_wakeup_fd(-1)
            confinement.confine(self._how, confinement.Bounds(**bounds), self._pid)
        except BaseException as error:  # noqa: BLE001 (whatever it is, the program must not run)
            with contextlib.suppress(OSError):
                os.write(report, f"error {type(error).__name__}: {error}\n".encode())
            os._exit(runner.ERROR)
        try:
            if "session" in job:
                runner.serve()
            runner.run(job["code"], job["calls"])
        finally:
            os._exit(runner.ERROR)  # never return here, whatever the program did to the runner


def _arrange(descriptors: Sequence[int], keep: int) -> None:
    moved = [_moved_up(descriptor) for descriptor in descriptors]
    for place, descriptor in enumerate(moved):
        os.dup2(descriptor, place)
    os.closerange(4, max(keep, 4))
    os.closerange(max(keep + 1, 4), 1 << 20)


def _settle_down(core: int) -> None:
    """Stay on ``core``: the filter later refuses changes.

    With autogroup (sched(7)) a program in its own session gets an equal share of it, whatever its number of threads.
    """
    with contextlib.suppress(OSError):  # the container may have lost it
        os.sched_setaffinity(0, [core])
    os.setsid()


def _moved_up(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, runner.REPORT + 1)


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def _address_space() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def warm(profile: str, folders: list[str]) -> None:
    sys.path.extend(folders)
    threading.stack_size(_STACK_BYTES)
    for name in _WARM:
        importlib.import_module(name)
    if profile == "numpy":
        importlib.import_module("numpy").random.seed()
        for name in ("numpy.linalg", "numpy.fft", "numpy.polynomial", "numpy.ma", "numpy.testing"):
            importlib.import_module(name)
    runner.add_prelude()


def keep_listings(hidden: Sequence[str]) -> None:
    """Cache listings of folders that programs cannot list but import from."""
    for path in sys.path:
        finder = sys.path_importer_cache.get(path)
        if isinstance(finder, FileFinder) and any(os.path.dirname(folder) == path for folder in hidden):  # noqa: PTH120
            finder._fill_cache()  # type: ignore[attr-defined]
            finder._fill_cache = lambda: None  # type: ignore[attr-defined]


def settle(tier: str, user_id: int, revealed: Sequence[str]) -> None:
    """Become the programs' user; in tier ``namespace`` also the first process of a new PID namespace.

    Only the owner of its PID namespace can return to it after each fork into another (setns(2)).

    Args:
        revealed: files and folders that this user cannot read in place.
    """
    obstacle = _reveal(revealed) if revealed else ""
    if user_id:
        confinement.become(user_id)
    if hidden := [path for path in revealed if not os.access(path, os.R_OK)]:
        sys.exit(
            f"expected user {user_id}, as whom programs run, to be able to read the interpreter, found that it "
            f"cannot read {hidden[0]}, and {obstacle or 'neither where it was mounted for it'}: install bubblewrap, or set "
            "reward.executor.interpreter to a Python that this user can read, such as /usr/bin/python3"
        )
    if tier == "namespace":
        confinement.enter_user_namespace(confinement.NEW_PID)
        pid = os.fork()
        if pid:
            confinement.die_with_parent()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    confinement.die_with_parent()


def _reveal(paths: Sequence[str]) -> str:
    try:
        confinement.reveal(paths)
    except OSError as error:
        return f"it cannot be mounted elsewhere ({error})"
    return ""


def main() -> None:
    settings = json.loads(sys.argv[1])
    del sys.path[0]  # the folder of this package
    sys.argv = ["program.py"]
    settle(settings["tier"], settings["user_id"], settings["revealed"])
    warm(settings["profile"], settings["folders"])
    if settings["tier"] == "landlock":
        keep_listings(settings["hidden"])
    zygote = Zygote(settings)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        zygote.run()
    os._exit(0)  # children die with their parent
