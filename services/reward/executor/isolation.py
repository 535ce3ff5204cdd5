"""How a warm interpreter is started in each tier: what it sees, as whom it runs, and the command. Starts nothing itself but
the interpreter once, to ask where its library is."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from shared.errors import SettingsError

INSIDE = Path(__file__).parent / "inside"
ENVIRONMENT = {"LC_ALL": "C.UTF-8", "TZ": "UTC", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""All of a warm interpreter's environment."""
THREADS = 64
"""Threads of one program, about: in tier landlock the kernel counts all of the user's together."""
_SYSTEM = (
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_QUESTION = """
import importlib.util, json, os, sys, sysconfig
found = importlib.util.find_spec("numpy")
numpy = os.path.dirname(found.origin) if found and found.origin else ""
paths = sysconfig.get_paths()
print(json.dumps({
    "program": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "library": sorted({paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib")}),
    "numpy": numpy,
}))
"""
_MAY_READ = """
import json, os, sys
user = int(sys.argv[1])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
print(json.dumps([path for path in sys.argv[2:] if not os.access(path, os.R_OK)]))
"""
"""Imports nothing after the change of user: the library may be out of its reach."""
_START = "import sys; sys.path.insert(0, {0!r}); from inside.zygote import main; main()"
_ASK_WITHIN_S = 30.0
_CAP_SYS_ADMIN = 1 << 21


@dataclasses.dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that runs programs."""

    program: str
    library: tuple[str, ...]
    numpy: str
    """Folder of the package; empty: it has none."""

    @classmethod
    def find(cls, program: str) -> "Interpreter":
        """Ask ``program`` (empty: this Python) where it is.

        Raises:
            SettingsError: it does not answer.
        """
        fields = _ask([program or sys.executable, "-I", "-c", _QUESTION])
        return cls(fields["program"], tuple(fields["library"]), fields["numpy"])

    def readable(self, profile: str) -> tuple[str, ...]:
        """Return what programs of ``profile`` may read: files and folders that exist, none within another."""
        wanted = [*_SYSTEM, *self.library, self.program]
        if profile == "numpy":
            wanted += [self.numpy, f"{self.numpy}.libs"]
        found = sorted(path for path in wanted if Path(path).exists())
        return tuple(path for path in found if not any(path.startswith(f"{other}/") for other in found))

    def unreadable(self, user_id: int) -> tuple[str, ...]:
        """Return what of :meth:`readable`, in any profile, ``user_id`` cannot read. Only root may ask.

        Raises:
            SettingsError: the interpreter does not answer.
        """
        paths = self.readable("numpy" if self.numpy else "stdlib")
        command = [self.program, "-I", "-S", "-c", _MAY_READ, str(user_id), *paths]
        return tuple(_ask(command))

    def folders(self, profile: str) -> list[str]:
        """Return what is added to ``sys.path``; programs can list it, and import of it what ``readable`` names."""
        return [str(Path(self.numpy).parent)] if profile == "numpy" else []


@dataclasses.dataclass(frozen=True, slots=True)
class Isolation:
    """One tier on this host."""

    tier: str
    """``namespace``, ``landlock`` or ``unsafe``."""
    interpreter: Interpreter
    user_id: int
    """Whom the warm interpreter becomes; 0: whoever started it."""
    threads: int
    mount_proc: Sequence[str] = ("--proc", "/proc")
    """How bubblewrap gives the warm interpreter its /proc; programs never see it."""
    unreadable: tuple[str, ...] = ()
    """Parts of the interpreter that ``user_id`` cannot read where they are; the warm interpreter mounts them for it."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: ENVIRONMENT)

    def command(self, profile: str, control: int) -> list[str]:
        """Return what starts a warm interpreter whose control socket is descriptor ``control``."""
        readable = self.interpreter.readable(profile)
        package = "/penstock" if self.tier == "namespace" else str(INSIDE.parent)
        settings = {
            "control": control,
            "tier": self.tier,
            "profile": profile,
            "folders": self.interpreter.folders(profile),
            "readable": [*readable, *_DEVICES],
            "revealed": [path for path in readable if path in self.unreadable],
            "threads": self.threads,
            "user_id": self.user_id,
        }
        python = [
            self.interpreter.program,
            "-I",
            "-S",
            "-B",
            "-X",
            "utf8",
            "-c",
            _START.format(package),
            json.dumps(settings),
        ]
        return [*self._bubblewrap(profile), *python] if self.tier == "namespace" else python

    def _bubblewrap(self, profile: str) -> list[str]:
        command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--die-with-parent", "--new-session", "--dev", "/dev", "--tmpfs", "/tmp", *self.mount_proc]  # noqa: S108
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if self.user_id else ["--unshare-user"]
        readable = self.interpreter.readable(profile)
        for folder in sorted({str(parent) for path in readable for parent in Path(path).parents} - {"/"}):
            command += ["--dir", folder]  # bubblewrap's own are for root alone
        for path in readable:
            if Path(path).is_symlink() and Path(path).is_dir():
                command += ["--symlink", str(Path(path).readlink()), path]
            else:
                command += ["--ro-bind", path, path]
        return [*command, "--ro-bind", str(INSIDE), f"/penstock/{INSIDE.name}", "--chdir", "/"]


def candidates(tier: str, interpreter: Interpreter, user_id: int, slots: int) -> list[Isolation]:
    """Return the ways to build ``tier`` here, best first.

    Args:
        user_id: whom programs run as where this process is root.

    Raises:
        SettingsError: a program that it needs is missing.
    """
    switch = user_id if os.geteuid() == 0 and _has_capabilities() else 0
    if tier == "unsafe":
        return [Isolation(tier, interpreter, 0, 0)]
    if tier == "landlock":
        threads = _tasks_of(switch or os.geteuid()) + THREADS * (slots + 1)
        unreadable = interpreter.unreadable(switch) if switch else ()
        return [Isolation(tier, interpreter, switch, threads, unreadable=unreadable)]
    if shutil.which("bwrap") is None:
        raise SettingsError("bwrap not found: install bubblewrap")
    ways = (("--proc", "/proc"), ("--dev-bind", "/proc", "/proc"))  # the second where a container covers parts of /proc
    return [Isolation(tier, interpreter, switch, THREADS, way) for way in ways]


def _ask(command: Sequence[str]) -> Any:
    """Return what a Python prints, as JSON.

    Raises:
        SettingsError: it does not answer.
    """
    try:
        answer = subprocess.run(command, env={}, capture_output=True, check=True, timeout=_ASK_WITHIN_S)
        return json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SettingsError(
            f"expected a Python at {command[0]}, found: {error}: change reward.executor.interpreter"
        ) from error


def _has_capabilities() -> bool:
    """Whether this root is one (in a container it may be root in name only)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) & _CAP_SYS_ADMIN)


def _tasks_of(user_id: int) -> int:
    tasks = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        if process.info["uids"] is not None and process.info["uids"].real == user_id:
            tasks += process.info["num_threads"] or 1
    return tasks
