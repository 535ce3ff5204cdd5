"""Confine a child of the warm interpreter before it runs a program, in this order.

::

    namespaces (tier namespace)   users, mounts, IPC; empty /proc, small /tmp; before Landlock, which forbids mounting
    file descriptors              0 input, 1 output, 2 nothing, 3 report
    limits                        CPU, address space, file size, descriptors, threads, core
    Landlock                      reads the interpreter, writes its own /tmp; no TCP; signals stay inside
    capabilities                  none
    system calls                  the allowlist; last, for it forbids all of the above

A failing step raises OSError, so no program starts half confined.
"""

import contextlib
import ctypes
import errno
import os
import resource
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from . import seccomp

NEW_USER, NEW_PID, NEW_MOUNT, NEW_IPC = 0x10000000, 0x20000000, 0x00020000, 0x08000000
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVS = 1, 4, 38
_NO_SUID, _NO_DEVICES, _NO_EXEC, _READ_ONLY = 2, 4, 8, 1
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ABI_QUESTION, _PATH_BENEATH = 1, 1
_READ = 0b1100
"""LANDLOCK_ACCESS_FS_READ_FILE and READ_DIR."""
_WRITE = 0b10
"""LANDLOCK_ACCESS_FS_WRITE_FILE."""
_OPEN_FILES = 64
_OWN = "/tmp"  # noqa: S108 (of its mount namespace, which nobody shares)
_STDIN = "/proc/self/fd/0"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Confinement:
    tier: str
    readable: tuple[str, ...]
    threads: int
    """RLIMIT_NPROC: per program in its own user namespace, otherwise per user."""
    ruleset: int = -1
    """Descriptor of shared Landlock rules; -1 if programs have their own files."""


@dataclass(frozen=True)
class Bounds:
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    files: int


def check(result: int, call: str) -> int:
    """Raise OSError for a negative result."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {errno.errorcode.get(number, number)}")
    return result


def enter_user_namespace(more: int = 0) -> None:
    """Enter a new user namespace as the same user, and the namespaces ``more``."""
    user, group = os.getuid(), os.getgid()
    check(_libc.unshare(NEW_USER | more), "unshare(CLONE_NEWUSER)")
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self belongs to root
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 (pathlib is not loaded in every child)
            file.write(text)


def unshare(kinds: int) -> None:
    """CLONE_NEWPID applies to the next child."""
    check(_libc.unshare(kinds), "unshare")


def enter(descriptor: int, kinds: int) -> None:
    check(_libc.setns(descriptor, kinds), "setns")


def reveal(paths: Sequence[str]) -> None:
    """Enter a mount namespace in which every user can reach ``paths``: the topmost closed folder on the way (such as
    ``/root``) is covered by one with only these paths.
    """
    check(_libc.unshare(NEW_MOUNT), "unshare(CLONE_NEWNS)")
    check(_libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "mount(/)")
    opened = {
        path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths
    }  # a bind mount needs one of this namespace
    mask = os.umask(0o022)
    for closed in sorted({_closed_folder(path) for path in paths}):
        check(_libc.mount(b"tmpfs", closed.encode(), b"tmpfs", _NO_SUID | _NO_DEVICES, b"mode=755"), f"mount({closed})")
    for path, descriptor in opened.items():
        _bind(descriptor, path)
        os.close(descriptor)
    os.umask(mask)


def _closed_folder(path: str) -> str:
    """Return the topmost inaccessible folder on the way to ``path``, or its parent."""
    folder = ""
    for name in path.split("/")[1:-1]:
        folder = f"{folder}/{name}"
        if not os.stat(folder).st_mode & 0o001:  # noqa: PTH116
            break
    return folder


def _bind(descriptor: int, path: str) -> None:
    source = f"/proc/self/fd/{descriptor}"
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if os.path.isdir(source):  # noqa: PTH112
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    check(_libc.mount(source.encode(), path.encode(), None, _BIND | _RECURSIVE, None), f"mount({path})")


def become(user: int) -> None:
    """Switch from root to ``user``, without supplementary groups."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self belongs to root


def die_with_parent(parent: int | None = None) -> None:
    """Die with the parent; a change of user or user namespace resets this.

    Raises:
        ProcessLookupError: ``parent`` has died before.
    """
    check(_libc.prctl(_SET_PARENT_DEATH_SIGNAL, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        raise ProcessLookupError("the warm interpreter has died")


def confine(how: Confinement, bounds: Bounds, parent: int) -> None:
    """Confine this process, a child of ``parent``; ``_libc`` and loaded modules stay usable."""
    if how.tier == "namespace":  # of which the parent is the first process: the kernel kills all with it
        _enter_namespaces(bounds)
        die_with_parent()
    else:
        die_with_parent(parent)
    _limit(how, bounds)
    if how.tier == "unsafe":
        return
    check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _restrict_paths(how)
    _drop_capabilities()
    check(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    seccomp.load(seccomp.filter_here())


def _enter_namespaces(bounds: Bounds) -> None:
    enter_user_namespace(NEW_MOUNT | NEW_IPC)
    flags = _NO_SUID | _NO_DEVICES
    options = f"size={bounds.file_bytes},nr_inodes={bounds.files + 1},mode=700".encode()
    check(_libc.mount(b"tmpfs", _OWN.encode(), b"tmpfs", flags, options), "mount(/tmp)")
    _cover_proc(flags | _NO_EXEC)
    os.chdir(_OWN)


def _cover_proc(flags: int) -> None:
    """Mount a /proc with only a copy of standard input, to which /dev/stdin links."""
    size = os.fstat(0).st_size
    options = f"size={max(size, 1)},nr_inodes=4,mode=755".encode()
    check(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags, options), "mount(/proc)")
    os.makedirs(os.path.dirname(_STDIN))  # noqa: PTH103, PTH120
    copy = os.open(_STDIN, os.O_CREAT | os.O_WRONLY, 0o444)
    copied = 0
    while copied < size:
        copied += os.sendfile(copy, 0, copied, size - copied)
    os.close(copy)
    check(_libc.mount(None, b"/proc", None, flags | _REMOUNT | _READ_ONLY, options), "mount(/proc, MS_REMOUNT)")


def _limit(how: Confinement, bounds: Bounds) -> None:
    limits = [
        (resource.RLIMIT_CPU, bounds.cpu_s),
        (resource.RLIMIT_AS, bounds.memory_bytes),
        (resource.RLIMIT_FSIZE, bounds.file_bytes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    ]
    if how.tier != "unsafe":
        limits.append((resource.RLIMIT_NPROC, how.threads))
    for kind, value in limits:
        with contextlib.suppress(ValueError):  # already lower
            resource.setrlimit(kind, (value, value))


def landlock_abi() -> int:
    """Raises OSError: ENOSYS (missing) or EOPNOTSUPP (disabled)."""
    return check(_libc.syscall(_CREATE_RULESET, None, 0, _ABI_QUESTION), "landlock_create_ruleset")


def make_ruleset(readable: Sequence[str], hidden: Sequence[str] = ()) -> int:
    """Return a descriptor of Landlock rules: reading ``readable`` except ``hidden``, no other files, no TCP.

    Landlock cannot exclude part of a folder, so folders that contain something hidden are allowed entry by entry and
    cannot be listed.
    """
    attributes = struct.pack("=QQQ", _handled_files(), 0b11 if landlock_abi() >= 4 else 0, 0b11)
    attributes = attributes[: 24 if landlock_abi() >= 6 else 16 if landlock_abi() >= 4 else 8]
    ruleset = check(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    secluded = frozenset(os.path.realpath(path) for path in hidden)
    for path in readable:
        if hidden:
            _allow_but(ruleset, os.path.realpath(path), secluded)
        else:
            _allow(ruleset, path, _READ)
    _allow(ruleset, "/dev/null", _READ | _WRITE)
    return ruleset


def _handled_files() -> int:
    abi = landlock_abi()
    return int((1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1)


def _allow_but(ruleset: int, path: str, hidden: frozenset[str]) -> None:
    if path in hidden or not any(other.startswith(f"{path}/") for other in hidden):
        if path not in hidden:
            _allow(ruleset, path, _READ)
        return
    for entry in os.scandir(path):
        if not entry.is_symlink():  # its target is allowed by its own path, if at all
            _allow_but(ruleset, entry.path, hidden)


def _restrict_paths(how: Confinement) -> None:
    ruleset = how.ruleset
    if ruleset < 0:
        ruleset = make_ruleset(how.readable)
        _allow(ruleset, _OWN, _handled_files() & 0b110000110111110)
        _allow(ruleset, _STDIN, _READ)
    check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    access &= ~0b1000 if not os.path.isdir(path) else ~0  # noqa: PTH112
    rule = struct.pack("=Qi", access, beneath)
    check(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule({path})")
    os.close(beneath)


def _drop_capabilities() -> None:
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    check(_libc.capset(header, nothing), "capset")
