"""Serves a process's newest snapshot by TCP, with one thread and process group per puller.

::

    owner (the trainer's loop, a replica's worker)      threads of the source
      offer(snapshot) ──▶ Shelf ◀── look ── Session 1 ═══ group ═══ replica
      withdraw(wait_s)             ◀── look ── Session 2 ═══ group ═══ replica
                                              TCPStore: where groups meet

The owner never waits for pullers; overwriting a snapshot makes its pulls fail, at the latest by checksum. Arriving
snapshots are relayed as buckets are marked.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.shared.errors import PeerError
from penstock.shared.peers.addresses import listen, reachable
from penstock.shared.peers.handshake import Newcomers, Secret, admit
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.source.files import Files
from penstock.shared.weights.source.session import Session
from penstock.shared.weights.source.shelf import Shelf
from penstock.shared.weights.transport.rendezvous import Rendezvous

log = logging.getLogger(__name__)

MAX_SESSIONS = 256
"""More pullers are refused."""
MAX_STRANGERS = 64
"""Unauthenticated connections; one more drops the oldest."""
IDLE_S = 1800.0
"""Time after which idle pullers must reconnect."""
_PATIENCE_S = 2.0
"""Time that a puller may wait for a new version."""


class WeightSource:
    """Serves clients that know ``secret`` on ``host``:``port`` (0: any free one); may raise SettingsError.

    ``deadline_s`` limits each wait, ``idle_s`` the time between requests. ``file_folder`` is for pulls by file.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        *,
        deadline_s: float,
        idle_s: float = IDLE_S,
        file_folder: Path | None = None,
    ) -> None:
        self._deadline_s, self._idle_s = deadline_s, idle_s
        self._secret = secret
        self._shelf = Shelf(min(_PATIENCE_S, deadline_s / 2))
        self._files = Files(file_folder)
        self._listener = listen(host, port, "run.host")
        self._rendezvous = Rendezvous(host, deadline_s)
        self._strangers = Newcomers(MAX_STRANGERS)
        self._connections: set[socket.socket] = set()
        self._pullers: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.address = f"{reachable(host)}:{self._listener.getsockname()[1]}"
        self._spawn(self._accept, "source")

    def offer(self, snapshot: FlatSnapshot, others: Sequence[str] = ()) -> None:
        """Serve ``snapshot``, complete or not; does not wait. ``others``: sources of the other shares, by rank."""
        self._shelf.put(snapshot, others)

    def withdraw(self, wait_s: float) -> None:
        """Stop serving; wait up to ``wait_s`` for pulls, then make them fail."""
        self._shelf.clear(wait_s)

    def close(self) -> None:
        """Stop serving; pulls fail. Takes at most about the deadline."""
        self._closed = True
        self._shelf.clear(0.0)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            _hang_up(connection)
        ends_at_s = time.monotonic() + self._deadline_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at_s - time.monotonic()))

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
                self._serve(connection)
            except (OSError, RuntimeError):  # e.g. out of file descriptors or threads
                if not self._closed:
                    log.warning("accepting a puller failed", exc_info=True)
                    time.sleep(0.1)

    def _serve(self, connection: socket.socket) -> None:
        def run() -> None:
            try:
                self._answer(connection)
            except PeerError as error:
                log.debug("refused a connection that is not a puller's", extra={"reason": str(error)})
            except Exception:
                log.exception("a session with a puller broke")
            finally:
                self._forget(connection)

        self._connections.add(connection)
        self._strangers.enter(connection, lambda: _hang_up(connection))
        try:
            self._spawn(run, "source session")
        except RuntimeError:
            self._forget(connection)
            raise

    def _answer(self, connection: socket.socket) -> None:
        admit(connection, self._secret(), self._deadline_s)
        self._strangers.leave(connection)
        if len(self._pullers) >= MAX_SESSIONS:
            raise PeerError(f"{MAX_SESSIONS} pullers are connected already")
        self._pullers.add(connection)
        Session(
            connection, self._shelf, self._rendezvous, self._files, self.address, self._deadline_s, self._idle_s
        ).run()

    def _forget(self, connection: socket.socket) -> None:
        connection.close()
        self._strangers.leave(connection)
        self._pullers.discard(connection)
        self._connections.discard(connection)

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads = [known for known in self._threads if known.is_alive()] + [thread]


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
