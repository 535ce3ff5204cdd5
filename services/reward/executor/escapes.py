"""Programs that try to escape, each with real targets; contained if they print nothing, or the kernel killed them.

A harmless program must run first, because a sandbox that runs nothing contains everything.
"""

import contextlib
import dataclasses
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.shared.executor.protocol import Execution, Job, Limits, Outcome

_PRELUDE = """
import ctypes, os, socket, sys
supervisor, secret, port = {pid}, {secret!r}, {port}
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, act):
    try:
        got = act()
    except (OSError, AttributeError):
        return
    print(what, repr(got)[:80])
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
"""
_HARMLESS = "import json, math; print(json.dumps(math.comb(6, 3) * 2 + 2))"
_ESCAPES = {
    "read files": """
attempt("read", lambda: open(secret).read())
attempt("listed", lambda: os.listdir(os.path.dirname(secret)))
attempt("read", lambda: open("/etc/hostname").read())
""",
    "write files": """
attempt("wrote", lambda: open(secret, "a").write("x"))
attempt("made", lambda: open(secret + ".new", "w"))
attempt("changed mode", lambda: os.chmod(secret, 0o600))
""",
    "see processes": """
attempt("listed", lambda: [pid for pid in os.listdir("/proc") if pid.isdigit()][0])
attempt("read", lambda: open(f"/proc/{supervisor}/environ", "rb").read())
attempt("read", lambda: open(f"/proc/{os.getppid()}/environ", "rb").read())
""",
    "signal processes": """
for pid in (supervisor, os.getppid(), -1, 0):
    attempt("signalled", lambda: os.kill(pid, 0))
""",
    "use the network": """
attempt("connected", lambda: socket.create_connection(("127.0.0.1", port), 1))
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    attempt("socket", lambda: socket.socket(family, socket.SOCK_DGRAM))
""",
    "start processes": """
attempt("executed", lambda: os.posix_spawn("/usr/bin/env", ["env"], {}))
attempt("executed", lambda: os.execv("/bin/sh", ["sh", "-c", "echo out"]))
attempt("forked", os.fork)
""",
    "take memory beyond the limit": """
attempt("memfd", lambda: os.memfd_create("x"))
attempt("shared memory", lambda: call("shmget", 0, 1 << 20, 0o1600))
""",
    "enter namespaces": "attempt('unshared', lambda: call('unshare', 0x10000000))",
    "trace processes": "attempt('traced', lambda: call('ptrace', 16, supervisor, 0, 0))",
}
NAMES = tuple(_ESCAPES)
_LIMITS = Limits(wall_s=10.0, cpu_s=5.0, memory_bytes=256 << 20)


@dataclasses.dataclass(frozen=True, slots=True)
class EscapeTargets:
    secret: Path
    port: int

    def job(self, name: str, profile: str) -> Job:
        prelude = _PRELUDE.format(pid=os.getpid(), secret=str(self.secret), port=self.port)
        return Job(prelude + _ESCAPES[name], profile, limits=_LIMITS)


@contextlib.contextmanager
def targets() -> Iterator[EscapeTargets]:
    with tempfile.TemporaryDirectory(prefix="penstock-executor-") as folder, socket.socket() as listener:
        Path(folder).chmod(0o755)
        secret = Path(folder) / "secret"
        secret.write_text(secrets.token_hex(), encoding="utf-8")
        secret.chmod(0o666)
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield EscapeTargets(secret, listener.getsockname()[1])


def harmless(profile: str) -> Job:
    return Job(_HARMLESS, profile, limits=_LIMITS)


def works(execution: Execution) -> str:
    if execution.outcome is Outcome.FINISHED and execution.stdout == "42\n":
        return ""
    return f"a harmless program ended as {execution.outcome}: {execution.detail or repr(execution.stdout[:80])}"


def escaped(execution: Execution) -> str:
    if execution.outcome is Outcome.FORBIDDEN or (execution.outcome is Outcome.FINISHED and not execution.stdout):
        return ""
    return execution.stdout.strip().replace("\n", ", ")[:200] or f"{execution.outcome}: {execution.detail}"
