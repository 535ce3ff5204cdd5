"""A small disk that tests fill up."""

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Disk:
    """A folder that can be full: a tmpfs if mounting is allowed, otherwise a file size limit."""

    def __init__(self, folder: Path, *, mounted: bool) -> None:
        self.folder = folder
        self.mounted = mounted
        """Whether it is full for all processes, not only this one."""

    @contextlib.contextmanager
    def full(self, left_bytes: int = 0) -> Iterator[None]:
        if not self.mounted:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (left_bytes, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            return
        filler = self.folder / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.folder).free - left_bytes)
        try:
            yield
        finally:
            filler.unlink()


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Disk]:
    folder.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    mounted = mount is not None and subprocess.run([mount, *options], capture_output=True, check=False).returncode == 0
    try:
        yield Disk(folder, mounted=mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
