"""Start warm interpreters in each tier."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from penstock.shared.errors import SettingsError

INSIDE = Path(__file__).parent / "inside"
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
"""The whole environment. One malloc arena saves 64 MiB of address space per thread."""
THREADS = 32
"""Per program, besides the main thread. In tier landlock the kernel counts all programs together."""
_SYSTEM = (
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_QUESTION = """
import importlib.util, json, os, sys, sysconfig
found = importlib.util.find_spec("numpy")
numpy = os.path.dirname(found.origin) if found and found.origin else ""
base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
standard = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
print(json.dumps({
    "program": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "library": sorted({*standard, os.path.join(sys.base_prefix, "lib")}),
    "numpy": numpy,
}))
"""
_PACKAGES = ("site-packages", "dist-packages")
"""Hidden from programs, except numpy in its profile."""
_MAY_READ = """
import json, os, sys
user = int(sys.argv[1])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
print(json.dumps([path for path in sys.argv[2:] if not os.access(path, os.R_OK)]))
"""
"""Imports nothing after the change of user, when the library may be unreadable."""
_START = "import sys; sys.path.insert(0, {0!r}); from inside.zygote import main; main()"
_ASK_WITHIN_S = 30.0
_CAP_SYS_ADMIN = 1 << 21


@dataclasses.dataclass(frozen=True, slots=True)
class Interpreter:
    program: str
    library: tuple[str, ...]
    numpy: str

    @classmethod
    def find(cls, program: str) -> "Interpreter":
        """Query ``program`` (empty: this Python). Raises SettingsError."""
        fields = _ask([program or sys.executable, "-I", "-c", _QUESTION])
        return cls(fields["program"], tuple(fields["library"]), fields["numpy"])

    def readable(self, profile: str) -> tuple[str, ...]:
        paths = {path for path in (*_SYSTEM, *self.library, self.program) if Path(path).exists()}
        paths = {path for path in paths if not _is_below(path, paths)}
        if profile == "numpy" and self.numpy:
            packages = {path for path in (self.numpy, f"{self.numpy}.libs") if Path(path).exists()}
            hidden = _packages_below(paths)
            paths |= {path for path in packages if not _is_below(path, paths) or _is_below(path, hidden)}
        return tuple(sorted(paths))

    def hidden(self, profile: str) -> tuple[str, ...]:
        return tuple(sorted(_packages_below(self.readable(profile))))

    def unreadable(self, user_id: int) -> tuple[str, ...]:
        """Parts of :meth:`readable` that ``user_id`` cannot read. Requires root."""
        paths = self.readable("numpy" if self.numpy else "stdlib")
        command = [self.program, "-I", "-S", "-c", _MAY_READ, str(user_id), *paths]
        return tuple(_ask(command))

    def folders(self, profile: str) -> list[str]:
        return [str(Path(self.numpy).parent)] if profile == "numpy" else []


@dataclasses.dataclass(frozen=True, slots=True)
class Isolation:
    tier: str
    interpreter: Interpreter
    user_id: int
    threads: int
    mount_proc: Sequence[str] = ("--proc", "/proc")
    """bubblewrap's arguments for /proc; programs never see it."""
    unreadable: tuple[str, ...] = ()
    """Files that ``user_id`` cannot read in place."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: ENVIRONMENT)

    def command(self, profile: str, control: int) -> list[str]:
        """Return the command of a warm interpreter with control socket ``control``."""
        readable = self.interpreter.readable(profile)
        package = "/penstock" if self.tier == "namespace" else str(INSIDE.parent)
        settings = {
            "control": control,
            "tier": self.tier,
            "profile": profile,
            "folders": self.interpreter.folders(profile),
            "readable": [*readable, *_DEVICES],
            "hidden": self.interpreter.hidden(profile),
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
            "-X",
            "int_max_str_digits=0",
            "-c",
            _START.format(package),
            json.dumps(settings),
        ]
        return [*self._bubblewrap(profile), *python] if self.tier == "namespace" else python

    def _bubblewrap(self, profile: str) -> list[str]:
        command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--die-with-parent", "--new-session", "--dev", "/dev", "--tmpfs", "/tmp", *self.mount_proc]  # noqa: S108
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if self.user_id else ["--unshare-user"]
        readable, hidden = self.interpreter.readable(profile), self.interpreter.hidden(profile)
        for folder in sorted({str(parent) for path in readable for parent in Path(path).parents} - {"/"}):
            command += ["--dir", folder]  # bubblewrap's own are for root only
        for path in sorted([*readable, *hidden]):  # sorted: a folder precedes its contents
            if path in hidden:
                command += ["--tmpfs", path]
            elif Path(path).is_symlink() and Path(path).is_dir():
                command += ["--symlink", str(Path(path).readlink()), path]
            else:
                command += ["--ro-bind", path, path]
        for path in hidden:
            command += ["--remount-ro", path]
        return [*command, "--ro-bind", str(INSIDE), f"/penstock/{INSIDE.name}", "--chdir", "/"]


def candidates(tier: str, interpreter: Interpreter, user_id: int, programs: int) -> list[Isolation]:
    switch = user_id if os.geteuid() == 0 and _has_capabilities() else 0
    if tier == "unsafe":
        return [Isolation(tier, interpreter, 0, 0)]
    if tier == "landlock":
        threads = _tasks_of(switch or os.geteuid()) + (THREADS + 1) * (programs + 1)
        unreadable = interpreter.unreadable(switch) if switch else ()
        return [Isolation(tier, interpreter, switch, threads, unreadable=unreadable)]
    if shutil.which("bwrap") is None:
        raise SettingsError("bwrap not found: install bubblewrap")
    ways = (
        ("--proc", "/proc"),
        ("--dev-bind", "/proc", "/proc"),
    )  # the second for containers that cover parts of /proc
    return [Isolation(tier, interpreter, switch, THREADS + 1, way) for way in ways]


def _ask(command: Sequence[str]) -> Any:
    try:
        answer = subprocess.run(command, env={}, capture_output=True, check=True, timeout=_ASK_WITHIN_S)
        return json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SettingsError(
            f"could not run a Python at {command[0]}: {error}: change reward.executor.interpreter"
        ) from error


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def _packages_below(folders: Iterable[str]) -> set[str]:
    patterns = [f"{depth}{name}" for name in _PACKAGES for depth in ("", "*/", "*/*/")]
    real = (Path(folder) for folder in folders if not Path(folder).is_symlink())
    return {str(path) for folder in real for pattern in patterns for path in folder.glob(pattern) if path.is_dir()}


def _has_capabilities() -> bool:
    """Whether root has capabilities; in a container it may not."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) & _CAP_SYS_ADMIN)


def _tasks_of(user_id: int) -> int:
    tasks = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        if process.info["uids"] is not None and process.info["uids"].real == user_id:
            tasks += process.info["num_threads"] or 1
    return tasks
