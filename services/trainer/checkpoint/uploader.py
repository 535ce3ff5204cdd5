"""Upload folders beside training, one at a time.

::

    driver ── add ──▶ waiting: at most one of each kind; a newer one takes its place
                         └─▶ copied, retried with growing pauses, until it is there or a newer one waits

A folder must not change during its upload (:meth:`Uploader.uses`).
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from penstock.services.trainer import metrics
from penstock.shared.backoff import Backoff
from penstock.shared.errors import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")
_BACKOFF = Backoff(1.0, longest_s=60.0)


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of ``work`` from a daemon thread, as storage may hang."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 (the outermost edge of this thread; the caller raises it)
            error = raised
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="object storage", daemon=True).start()
    answer: T = await future
    return answer


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    kind: str
    folder: Path
    copy: Callable[[], Awaitable[int]]
    """Resumable; returns the bytes sent. May raise StoreError."""
    is_there: Callable[[], bool]


class Uploader:
    """Uploads jobs, on the event loop; ``failed`` is called with the first failure in a row."""

    def __init__(self, failed: Callable[[Upload, StoreError], Awaitable[None]]) -> None:
        self._failed = failed
        self._changed = asyncio.Event()
        self._waiting: dict[str, Upload] = {}
        self._current: Upload | None = None
        self._behind_since_s: float | None = None
        self._added_at_s = 0.0
        self._failures = 0  # in a row
        self._closing = False
        metrics.UNSTORED.set_function(self.unstored_s)

    def add(self, job: Upload) -> None:
        """Queue a folder instead of a waiting one of its kind."""
        self._waiting[job.kind] = job
        self._added_at_s = time.monotonic()
        if self._behind_since_s is None:
            self._behind_since_s = self._added_at_s
        self._changed.set()

    def uses(self, folder: Path) -> bool:
        """Whether ``folder`` is being uploaded, and must stay."""
        return self._current is not None and self._current.folder == folder

    @property
    def is_idle(self) -> bool:
        """Whether everything queued is stored."""
        return self._current is None and not self._waiting

    def unstored_s(self) -> float:
        """Return the age of unstored data in seconds, or 0. For any thread."""
        since_s = self._behind_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def close(self, wait_s: float) -> bool:
        """Wait for uploads, at most ``wait_s`` and not for an absent store; return whether all are done."""
        self._closing = True
        self._changed.set()
        return await self._until(lambda: self.is_idle, wait_s)

    async def run(self) -> None:
        """Upload queued folders, forever."""
        while True:
            await self._until(lambda: bool(self._waiting))
            job = self._current = self._waiting.pop(min(self._waiting))  # checkpoints before policies
            copied = await self._copy(job)
            self._current = None
            if not self._waiting:
                self._behind_since_s = None
            elif copied:
                self._behind_since_s = self._added_at_s
            self._changed.set()

    async def _copy(self, job: Upload) -> bool:
        """Return whether the job is done, not replaced or cancelled."""
        while job.is_there():
            started_s = time.perf_counter()
            try:
                sent_bytes = await job.copy()
            except StoreError as error:
                await self._note_failure(job, error)
                if await self._until(
                    lambda: self._closing or job.kind in self._waiting, _BACKOFF.wait_s(self._failures)
                ):
                    return False
                continue
            self._failures = 0
            metrics.STORE_BYTES.inc(sent_bytes)
            metrics.STORE_SECONDS.observe(time.perf_counter() - started_s)
            break
        return True

    async def _note_failure(self, job: Upload, error: StoreError) -> None:
        self._failures += 1
        metrics.STORE_FAILURES.inc()
        log.warning("not stored", extra={"folder": str(job.folder), "failures": self._failures, "error": str(error)})
        if self._failures == 1:
            await self._failed(job, error)

    async def _until(self, holds: Callable[[], bool], wait_s: float | None = None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        return holds()
