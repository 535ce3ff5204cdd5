"""Listening sockets of a process tree, from the kernel."""

import contextlib
import dataclasses
import ipaddress
import re
import socket
import sys
from pathlib import Path

import psutil

_LISTENING, _UNCONNECTED = "0A", "07"
_STATES = {
    "tcp": _LISTENING,
    "tcp6": _LISTENING,
    "udp": _UNCONNECTED,
    "udp6": _UNCONNECTED,
    "raw": _UNCONNECTED,
    "raw6": _UNCONNECTED,
}
_INODE = re.compile(r"socket:\[(\d+)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class Listener:
    kind: str
    address: str
    process: str

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listeners(*pids: int) -> set[Listener]:
    processes = [process for pid in pids for process in _tree(pid)]
    sockets = {kind: _sockets(kind) for kind in _STATES}
    collected = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            name = " ".join(process.cmdline()) or process.name()
            inodes = _inodes(process.pid)
            collected |= {
                Listener(kind, address, name)
                for kind, addresses in sockets.items()
                for inode, address in addresses.items()
                if inode in inodes
            }
    return collected


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _inodes(pid: int) -> set[str]:
    collected = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (match := _INODE.fullmatch(str(descriptor.readlink()))) is not None:
                collected.add(match[1])
    return collected


def _sockets(kind: str) -> dict[str, str]:
    lines = Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {field[9]: _address(field[1].partition(":")[0]) for field in fields if field[3] == _STATES[kind]}


def _address(hexadecimal: str) -> str:
    """Parse an address in the kernel's 32-bit words, machine byte order."""
    words = [
        int(hexadecimal[place : place + 8], 16).to_bytes(4, sys.byteorder) for place in range(0, len(hexadecimal), 8)
    ]
    raw = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
