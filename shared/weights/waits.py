"""Waiting for other processes with a deadline.

``poll`` tests repeatedly, so it is interruptible and holds no lock or GIL. ``bounded`` runs calls that may block
forever in a thread, abandoned at the deadline.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.shared.errors import WeightsError

T = TypeVar("T")
Interrupt = Callable[[], None]
"""Called repeatedly during a wait; raises :class:`WeightsError` to end it."""

FILE_DEADLINES = 10
"""For file snapshots: storage is slower than a fabric."""
_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001


def uninterrupted() -> None:
    """Interrupt nothing."""


def poll(done: Callable[[], bool], deadline_s: float, purpose: str, interrupt: Interrupt = uninterrupted) -> None:
    """Wait until ``done()``, which must not block.

    Raises WeightsError after ``deadline_s``, or if ``interrupt`` does.
    """
    ends_at_s = time.monotonic() + deadline_s
    pause_s = _FIRST_PAUSE_S
    while not done():
        interrupt()
        if time.monotonic() >= ends_at_s:
            raise WeightsError(f"timeout of {deadline_s:g} s while waiting for {purpose}: see weights.deadline_s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def bounded(
    call: Callable[[Interrupt], T],
    deadline_s: float,
    purpose: str,
    interrupt: Interrupt = uninterrupted,
    discard: Callable[[T], None] = lambda late: None,
) -> T:
    """Run ``call`` in a thread and return its result; ``discard`` gets a late one there. ``call`` is given an interrupt, by
    which its own waits end once its result is not waited for any longer.

    Raises WeightsError on timeout, interruption, or failure (from its own error).
    """
    attempt = _Attempt(call, discard)
    threading.Thread(target=attempt.run, name=f"bounded: {purpose}"[:60], daemon=True).start()
    try:
        poll(attempt.ended.is_set, deadline_s, purpose, interrupt)
    finally:
        attempt.leave()
    if attempt.error is not None:
        raise _told(attempt.error, purpose) from attempt.error
    return attempt.results[0]


class _Attempt(Generic[T]):
    def __init__(self, call: Callable[[Interrupt], T], discard: Callable[[T], None]) -> None:
        self._call = call
        self._discard = discard
        self._lock = threading.Lock()
        self._left = False
        self.ended = threading.Event()
        self.results: list[T] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            result = self._call(self._end_if_left)
        except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
            self.error = error
            self.ended.set()
            return
        with self._lock:
            late = self._left
            if not late:
                self.results.append(result)
                self.ended.set()
        if late:
            self._discard(result)

    def _end_if_left(self) -> None:
        if self._left:
            raise WeightsError("no process waits any longer")

    def leave(self) -> None:
        with self._lock:
            self._left = True


def _told(error: Exception, purpose: str) -> WeightsError:
    if isinstance(error, WeightsError):
        return WeightsError(str(error))
    return WeightsError(f"expected {purpose}, found {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
