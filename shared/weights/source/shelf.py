"""A source's snapshot and pulls, shared by owner and sessions.

The owner's calls lock briefly and never wait, except ``clear``.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Header
from penstock.shared.weights.waits import Interrupt, poll


class Shelf:
    """The served snapshot, if any, and its pulls."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._snapshot: FlatSnapshot | None = None
        self.others: Sequence[str] = ()
        """Addresses of the sources of the other shares."""
        self._pulls = 0
        self._cut = 0
        """Pulls that began before this many withdrawals are over."""

    def put(self, snapshot: FlatSnapshot, others: Sequence[str]) -> None:
        with self._changed:
            self._snapshot, self.others = snapshot, others

    def clear(self, wait_s: float) -> None:
        """Stop serving; after ``wait_s``, remaining pulls fail."""
        with self._changed:
            self._snapshot = None
            self._changed.wait_for(lambda: self._pulls == 0, wait_s)
            self._cut += 1

    def find(self, version: PolicyVersion, interrupt: Interrupt) -> tuple[FlatSnapshot, Header]:
        """Return the snapshot with ``version``, complete or arriving, after a short wait; else raises WeightsError."""
        snapshots: list[tuple[FlatSnapshot, Header]] = []

        def decided() -> bool:
            held = self._held()
            if held is not None and held[1].version >= version:
                snapshots.append(held)
            return bool(snapshots)

        with contextlib.suppress(WeightsError):
            poll(decided, self._patience_s, f"version {version}", interrupt)
        if not snapshots:
            held = self._held()
            holds = "nothing" if held is None else f"version {held[1].version}"
            raise WeightsError(f"expected version {version} at this source, found {holds}: it is not there yet")
        if snapshots[0][1].version != version:
            raise WeightsError(
                f"expected version {version} at this source, found version {snapshots[0][1].version}: it is gone"
            )
        return snapshots[0]

    def _held(self) -> tuple[FlatSnapshot, Header] | None:
        with self._changed:
            snapshot = self._snapshot
        header = snapshot.header if snapshot is not None else None
        return (snapshot, header) if snapshot is not None and header is not None else None

    @contextlib.contextmanager
    def pull(self, snapshot: FlatSnapshot) -> Iterator[Interrupt]:
        """Count the block as a pull; the yielded function raises WeightsError some time after a withdrawal."""
        with self._changed:
            if self._snapshot is not snapshot:
                raise WeightsError("the weights were just removed from this source")
            self._pulls += 1
            began = self._cut

        def interrupt() -> None:
            if self._cut != began:
                raise WeightsError("the snapshot was withdrawn during the pull")

        try:
            yield interrupt
        finally:
            with self._changed:
                self._pulls -= 1
                self._changed.notify_all()
