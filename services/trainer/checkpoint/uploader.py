"""Copies folders to object storage beside training: one at a time, the newest of its kind first. A daemon thread of rank 0.

::

    training thread ── add ──▶ waiting: at most one of each kind; a newer one takes its place
                                  └─▶ copied, again and again with growing pauses, until it is there or a newer one waits

The folder that is being copied must stay as it is (:meth:`Uploader.uses`). So the training thread never waits, a store that is slower than the checkpoints gets fewer of them, and one that is away for hours costs
the newest copy alone. What a copy means to the run is the job's own business, on this thread.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from services.trainer import metrics
from shared.backoff import Backoff
from shared.errors import StoreError

log = logging.getLogger(__name__)

_BACKOFF = Backoff(1.0, longest_s=60.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A folder to be copied."""

    kind: str
    folder: Path
    copy: Callable[[], int]
    """Copies it, going on where an attempt before was broken off; returns the bytes sent. May raise StoreError."""
    is_there: Callable[[], bool]
    """Whether there is still something to copy."""


class Uploader:
    """Copies jobs; ``failed`` is told of the first failure in a row."""

    def __init__(self, failed: Callable[[Upload, StoreError], None]) -> None:
        self._failed = failed
        self._changed = threading.Condition()
        self._waiting: dict[str, Upload] = {}
        self._current: Upload | None = None
        self._behind_since_s: float | None = None
        self._added_at_s = 0.0  # the newest
        self._failures = 0  # in a row
        self._closing = False
        self._bug: BaseException | None = None
        metrics.UNSTORED.set_function(self.unstored_s)
        threading.Thread(target=self._run, name="uploader", daemon=True).start()

    def add(self, job: Upload) -> None:
        """Have a folder copied; one of its kind that still waits is not copied any more."""
        self.check()
        with self._changed:
            self._waiting[job.kind] = job
            self._added_at_s = time.monotonic()
            if self._behind_since_s is None:
                self._behind_since_s = self._added_at_s
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what a bug raised on this thread, so that it stops the process."""
        if self._bug is not None:
            raise RuntimeError("copying to object storage ended by a bug") from self._bug

    def uses(self, folder: Path) -> bool:
        """Whether ``folder`` is being copied, and must stay."""
        with self._changed:
            return self._current is not None and self._current.folder == folder

    def unstored_s(self) -> float:
        """Return for how long what is newer than the last copy has waited, in seconds; 0 where nothing waits."""
        with self._changed:
            return 0.0 if self._behind_since_s is None else time.monotonic() - self._behind_since_s

    def close(self, wait_s: float) -> bool:
        """Wait until everything is copied, for at most ``wait_s`` and for no store that is away; return whether it is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._bug is not None or self._is_idle(), wait_s)
            return self._is_idle()

    def _is_idle(self) -> bool:
        return self._current is None and not self._waiting

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    job = self._current = self._waiting.pop(min(self._waiting))  # a checkpoint before a policy
                copied = self._copy(job)
                with self._changed:
                    self._current = None
                    if not self._waiting:
                        self._behind_since_s = None
                    elif copied:
                        self._behind_since_s = self._added_at_s
                    self._changed.notify_all()
        except BaseException as error:  # the outermost edge of this thread; told by check
            with self._changed:
                self._bug = error
                self._changed.notify_all()
            if not self._closing:
                log.exception("copying to object storage ended by a bug")

    def _copy(self, job: Upload) -> bool:
        """Return whether nothing of the job is left to do; else it was given up for a newer one, or as the process ends."""
        while job.is_there():
            started_s = time.perf_counter()
            try:
                sent_bytes = job.copy()
            except StoreError as error:
                self._failures += 1
                metrics.STORE_FAILURES.inc()
                shown = {"folder": str(job.folder), "failures": self._failures, "error": str(error)}
                log.warning("not stored", extra=shown)
                if self._failures == 1:
                    self._failed(job, error)
                if self._gives_up(job, _BACKOFF.wait_s(self._failures)):
                    return False
                continue
            self._failures = 0
            metrics.STORE_BYTES.inc(sent_bytes)
            metrics.STORE_SECONDS.observe(time.perf_counter() - started_s)
            break
        return True

    def _gives_up(self, job: Upload, pause_s: float) -> bool:
        """Wait before the next attempt; return whether there shall be none, as a newer one waits or the process ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or job.kind in self._waiting, pause_s)
            return self._closing or job.kind in self._waiting
