"""Private folders for temporary files, such as sockets, that do not outlive their owner.

The owner holds a lock on ``<folder>/.owner``, which the kernel releases when the process dies, even by ``kill -9``.
The process that makes the next folder removes those whose lock is free.
"""

import atexit
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PREFIX = "penstock-"
_OWNER = ".owner"
_MEMORY = Path("/dev/shm")  # noqa: S108 (where the kernel has shared memory)
_NOTED = "shared_memory"
_MAPPED = re.compile(rf"{_MEMORY}/((?:psm_|vllm_dist_)[^/\s]+)$", re.MULTILINE)
"""Python's and vLLM's shared memory in /proc/<pid>/maps; other names, such as CUDA's, may be shared with others."""
_SOCKET_AGE_S = 60.0
"""A younger socket may be bound and not yet listening."""
_locks: dict[Path, tuple[int, int]] = {}
"""The folders of this process: its id, which a fork has not, and the open file with the lock."""


def make(kind: str) -> Path:
    """Return a new private folder, ``penstock-<kind>-…`` in the system's folder for temporary files.

    It is removed by :func:`remove`, at the interpreter's exit, or after this process's death by the next :func:`make`.
    """
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
    named = folder / f"{_OWNER}.new"
    lock = os.open(named, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    named.rename(folder / _OWNER)  # never seen without its lock
    _locks[folder] = os.getpid(), lock
    atexit.register(remove, folder)
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of :func:`make` of this process; a second time does nothing."""
    owner, lock = _locks.pop(folder, (0, 0))
    if owner == os.getpid():
        _remove(folder)
        os.close(lock)


def note_shared_memory(folder: Path, pids: Iterable[int]) -> None:
    """Note the shared memory of the processes ``pids``, to be removed with the folder: a killed process leaves it."""
    names = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):
            names.update(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")))
    noted = {}
    for name in names:
        with contextlib.suppress(OSError):
            noted[name] = (_MEMORY / name).stat().st_ino
    with contextlib.suppress(OSError):
        (folder / _NOTED).write_text(json.dumps(noted), encoding="utf-8")


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        noted = json.loads((folder / _NOTED).read_text(encoding="utf-8"))
        for name, inode in noted.items():
            with contextlib.suppress(OSError):
                status = (_MEMORY / Path(name).name).stat(follow_symlinks=False)
                if (status.st_ino, status.st_uid) == (inode, os.getuid()):
                    (_MEMORY / Path(name).name).unlink()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def made(kind: str) -> Iterator[Path]:
    """Yield a folder of :func:`make` and remove it."""
    folder = make(kind)
    try:
        yield folder
    finally:
        remove(folder)


def remove_abandoned() -> None:
    """Remove what dead processes of this user left: folders of :func:`make`, and sockets on which no process listens."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(Path(entry.path), entry.stat(follow_symlinks=False))


def _remove_if_abandoned(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        return
    if stat.S_ISDIR(status.st_mode) and not _is_held(path / _OWNER):
        _remove(path)
    elif stat.S_ISSOCK(status.st_mode) and time.time() - status.st_mtime > _SOCKET_AGE_S and _is_deaf(path):
        path.unlink()


def _is_held(owner: Path) -> bool:
    """Return whether the owner lives. Raises FileNotFoundError: the folder is not of :func:`make`, or not complete."""
    lock = os.open(owner, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _is_deaf(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        return client.connect_ex(str(path)) == errno.ECONNREFUSED
