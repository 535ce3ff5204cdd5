"""The run's ``report.html``: noticed when it is written, at the end of the run or by ``penstock report``."""

import hashlib
from pathlib import Path
from stat import S_ISREG


class ReportFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._digest = ""

    def digest(self) -> str:
        """Return the digest of the file's contents; "" without a file. Raises OSError: it cannot be read."""
        try:
            stat = self.path.stat()
            if not S_ISREG(stat.st_mode):
                return ""  # to open a pipe would wait for its writer
            now = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if now != self._seen:
                with self.path.open("rb") as file:
                    self._digest = hashlib.file_digest(file, "sha256").hexdigest()
                self._seen = now
        except FileNotFoundError:
            return ""
        return self._digest
