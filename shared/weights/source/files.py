"""Serve weights as files to a puller that no group reaches."""

import threading
from pathlib import Path

from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Header
from penstock.shared.weights.format.snapshot import Snapshot, write_snapshot


class Files:
    """Writes the served snapshot to files on request, once per version."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._written: tuple[Header, Snapshot] | None = None

    def write(self, snapshot: FlatSnapshot, header: Header) -> Snapshot:
        """Return the snapshot's files, written now or before; raises WeightsError if that fails."""
        if self._folder is None:
            raise WeightsError("this source has no folder for snapshots: set weights.folder")
        with self._lock:
            if self._written is None or self._written[0] != header or not self._written[1].location.exists():
                tensors = snapshot.tensors().items()
                written = write_snapshot(self._folder, header.version, header.step, tensors, None)
                if snapshot.header is not header:
                    raise WeightsError(f"expected version {header.version} to stay while it was written: it is torn")
                self._written = (header, written)
            return self._written[1]
