"""Waiting with a deadline: the two ways in which anything here ever waits for another process.

``poll`` asks again and again whether something is done, so that it can be interrupted and never holds a lock or the GIL;
``bounded`` is for calls of libraries that may block for ever (a rendezvous with a stopped process): it runs them in a thread
that is left behind when the deadline passes, and whose late result is thrown away.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from shared.errors import WeightsError

T = TypeVar("T")
Interrupt = Callable[[], None]
"""Called again and again while something waits; raises :class:`WeightsError` to end the wait."""

FILE_DEADLINES = 10
"""Writing or reading a snapshot by file may take so many deadlines: storage is slower than a fabric."""
_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001


def uninterrupted() -> None:
    """Interrupt nothing."""


def poll(done: Callable[[], bool], deadline_s: float, what: str, interrupt: Interrupt = uninterrupted) -> None:
    """Return as soon as ``done()``; it must answer without blocking.

    Raises:
        WeightsError: ``deadline_s`` passed, or ``interrupt`` says so.
    """
    ends_at_s = time.monotonic() + deadline_s
    pause_s = _FIRST_PAUSE_S
    while not done():
        interrupt()
        if time.monotonic() >= ends_at_s:
            raise WeightsError(f"expected {what} within {deadline_s:g} s, found nothing: see weights.deadline_s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def bounded(
    call: Callable[[], T],
    deadline_s: float,
    what: str,
    interrupt: Interrupt = uninterrupted,
    discard: Callable[[T], None] = lambda late: None,
) -> T:
    """Return what ``call()`` returns from a thread of its own; a result that comes too late goes to ``discard`` there.

    Raises:
        WeightsError: it took longer than ``deadline_s``, was interrupted, or failed (from its own error).
    """
    attempt = _Attempt(call, discard)
    threading.Thread(target=attempt.run, name=f"bounded: {what}"[:60], daemon=True).start()
    try:
        poll(attempt.ended.is_set, deadline_s, what, interrupt)
    finally:
        attempt.leave()
    if attempt.error is not None:
        raise _told(attempt.error, what) from attempt.error
    return attempt.results[0]


class _Attempt(Generic[T]):
    """One call in a thread: either its caller takes the result, or it is discarded."""

    def __init__(self, call: Callable[[], T], discard: Callable[[T], None]) -> None:
        self._call = call
        self._discard = discard
        self._lock = threading.Lock()
        self._left = False
        self.ended = threading.Event()
        self.results: list[T] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """Call, then hand the result over, or discard it when nobody waits any more."""
        try:
            result = self._call()
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

    def leave(self) -> None:
        """Stop waiting."""
        with self._lock:
            self._left = True


def _told(error: Exception, what: str) -> WeightsError:
    if isinstance(error, WeightsError):
        return WeightsError(str(error))
    return WeightsError(f"expected {what}, found {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: torch appends whole stack traces to its own."""
    return str(error).partition("\n")[0][:300]
