"""A program's system-call filter: classic BPF, generated from the table in syscalls.py.

::

    another machine's calls (i386, x32)  ──▶ killed
    DEADLY                               ──▶ killed
    ALLOWED                              ──▶ made
    CONDITIONAL                          ──▶ made with some arguments, else EPERM; locks on files: not made, and reported as done
    anything else                        ──▶ EPERM

Filters see registers, not memory; confinement.py restricts paths.
"""

import ctypes
import errno
import os
import platform
import struct

from . import syscalls

_LOAD, _AND, _EQUAL, _GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # linux/bpf_common.h
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000  # linux/seccomp.h
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_X32 = 0x40000000
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_THREAD = 0x00010000 | 0x00000100
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032)
"""Duplicate, flags, the size of a pipe; not F_SETSIG, F_SETOWN (signals) nor F_SETPIPE_SZ (memory)."""
_FCNTL_LOCKS = (6, 7)
"""F_SETLK and F_SETLKW; not F_GETLK, which names processes that hold locks."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_PRCTL = (15, 16)
_KILL_SIGNAL, _STOP_SIGNAL = 9, 19
_UNIX, _STREAM = 1, 1

Instruction = tuple[int, int, int, int]
"""code, jump if true, jump if false, constant."""


def machine_filter(machine: str, pid: int) -> bytes:
    column = syscalls.MACHINES.index(machine) if machine in _ARCHITECTURES else -1
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        program += [(_GREATER_EQUAL, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for table, action in ((syscalls.ALLOWED, _ALLOW), (syscalls.DEADLY, _KILL)):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, action)]
    for name, body in _conditions(pid).items():
        number = syscalls.CONDITIONAL[name][column]
        if number is not None:
            program += [(_EQUAL, 0, len(body), number), *body]
    program.append(_refuse(errno.EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _conditions(pid: int) -> dict[str, list[Instruction]]:
    """Argument checks; every path of a list ends in a return."""
    return {
        "clone": [_argument(0), (_AND, 0, 0, _THREAD), *_one_of((_THREAD,))],
        "clone3": [_refuse(errno.ENOSYS)],  # its flags are in memory; libc falls back to clone
        "fcntl": [_argument(1), *_pretended(_FCNTL_LOCKS), *_one_of(_FCNTL)],
        "flock": [_pretend()],
        "ioctl": [_argument(1), *_one_of(_IOCTL)],
        "kill": _own_signal(pid, 1),
        "tgkill": _own_signal(pid, 2),
        "prctl": [_argument(0), *_one_of(_PRCTL)],
        "prlimit64": _null(2),
        "sendto": _null(4),
        "socketpair": [_argument(0), *_require(_UNIX), _argument(1), (_AND, 0, 0, 0xF), *_one_of((_STREAM,))],
    }


def _argument(index: int, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)


def _refuse(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _pretend() -> Instruction:
    """Report success: locks on a program's own files are useless, others would be visible to the host."""
    return _refuse(0)


def _pretended(values: tuple[int, ...]) -> list[Instruction]:
    return [step for value in values for step in ((_EQUAL, 0, 1, value), _pretend())]


def _require(value: int) -> list[Instruction]:
    return [(_EQUAL, 1, 0, value), _refuse(errno.EPERM)]


def _one_of(values: tuple[int, ...]) -> list[Instruction]:
    tests: list[Instruction] = []
    for value in values:
        tests += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*tests, _refuse(errno.EPERM)]


def _null(index: int) -> list[Instruction]:
    return [_argument(index), *_require(0), _argument(index, high=True), *_require(0), (_RETURN, 0, 0, _ALLOW)]


def _own_signal(pid: int, index: int) -> list[Instruction]:
    """Allow signals to itself, except those that would fake an end or stop by others."""
    harmful = [
        (_EQUAL, 0, 1, _KILL_SIGNAL),
        _refuse(errno.EPERM),
        (_EQUAL, 0, 1, _STOP_SIGNAL),
        _refuse(errno.EPERM),
    ]
    return [_argument(0), *_require(pid), _argument(index), *harmful, (_RETURN, 0, 0, _ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def load(program: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    described = _Program(len(program) // 8, program)
    for arguments in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(described), 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "seccomp")


def filter_here() -> bytes:
    return machine_filter(platform.machine(), os.getpid())
