"""Real executor processes in each tier, also in a container like a Kubernetes pod's under RuntimeDefault."""

import contextlib
import dataclasses
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from penstock.services.reward.executor.inside import syscalls
from tests.conftest import PATIENCE_S, free_port, need

ROOT = Path(__file__).parents[2]
POD_USER = 64_123
_DENIED = (
    "unshare",
    "setns",
    "mount",
    "umount2",
    "pivot_root",
    "move_mount",
    "open_tree",
    "fsopen",
    "fsmount",
    "mount_setattr",
)
_DENIED_TOO = (
    "bpf",
    "perf_event_open",
    "keyctl",
    "add_key",
    "request_key",
    "userfaultfd",
    "init_module",
    "finit_module",
    "syslog",
)
_NEW_NAMESPACES = 0x7E020000


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    address: str
    metrics: str
    process: subprocess.Popen[bytes]
    secret: Path
    port: int

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    def ready(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.get("/readyz"))
        return data

    def processes(self) -> list[psutil.Process]:
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]


def arguments(address: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.patient_executor", "--reward.executor.address", address, *more]


@contextlib.contextmanager
def running(*flags: str, wrapper: Sequence[str] = (), pass_fds: Sequence[int] = ()) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as name, socket.socket() as listener:
        folder = Path(name)
        folder.chmod(0o777)
        secret = folder / "secret"
        secret.write_text("of the host")
        secret.chmod(0o666)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        metrics = free_port()
        command = [part.replace("@FOLDER@", name) for part in wrapper]
        command += arguments(f"unix:{name}/executor.sock", "--run.metrics_port", str(metrics), *flags)
        environment = {"PATH": os.environ["PATH"], "A_SECRET": "of the host", "PYTHONPATH": str(ROOT)}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, pass_fds=pass_fds)
        running = Running(
            f"unix:{name}/executor.sock", f"127.0.0.1:{metrics}", process, secret, listener.getsockname()[1]
        )
        try:
            _wait(running, folder / "log")
            yield running
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _wait(running: Running, log: Path) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        if running.process.poll() is not None:
            raise AssertionError(f"the executor ended: {log.read_text()}")
        with contextlib.suppress(OSError):
            if running.ready()["ready"]:
                return
        time.sleep(0.05)
    raise AssertionError(f"the executor is not ready: {log.read_text()}")


def pod(folder: Path) -> tuple[list[str], int]:
    """Return a command prefix that runs a command as in a pod (unprivileged user, no capabilities, RuntimeDefault), and
    the descriptor of the filter.
    """
    denied = folder / "filter"
    denied.write_bytes(_runtime_default())
    descriptor = os.open(denied, os.O_RDONLY)
    return [*desk()[:-1], "--seccomp", str(descriptor), "--"], descriptor


def desk() -> list[str]:
    home = Path(sys.base_prefix)
    command = [
        need("bwrap", "bubblewrap"),
        "--unshare-user",
        "--uid",
        str(POD_USER),
        "--gid",
        str(POD_USER),
        "--cap-drop",
        "ALL",
    ]
    command += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/root", "--die-with-parent"]
    if Path("/root") in home.parents:
        for parent in reversed([path for path in home.parents if Path("/root") in path.parents]):
            command += ["--dir", str(parent)]
        command += ["--ro-bind", str(home), str(home)]
    command += ["--bind", "@FOLDER@", "@FOLDER@", "--setenv", "TMPDIR", "@FOLDER@"]
    return [*command, "--"]


def _runtime_default() -> bytes:
    """Return a filter like the default profile of container runtimes for a pod without capabilities."""
    column = syscalls.MACHINES.index(os.uname().machine)
    program = [(0x20, 0, 0, 0)]
    for name in (*_DENIED, *_DENIED_TOO):
        program += [(0x15, 0, 1, syscalls.DEADLY[name][column] or 0), (0x06, 0, 0, 0x00050001)]
    clone, clone3 = (syscalls.CONDITIONAL[name][column] or 0 for name in ("clone", "clone3"))
    program += [(0x15, 0, 1, clone3), (0x06, 0, 0, 0x00050026)]
    program += [(0x15, 0, 3, clone), (0x20, 0, 0, 16), (0x45, 0, 1, _NEW_NAMESPACES), (0x06, 0, 0, 0x00050001)]
    return b"".join(struct.pack("=HBBI", *line) for line in [*program, (0x06, 0, 0, 0x7FFF0000)])
