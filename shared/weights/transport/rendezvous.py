"""Where the groups of a source meet: a TCPStore in the source's process, on the source's own address alone."""

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from shared.peers import tcp_store


class Rendezvous:
    """The store of one source, for all of its sessions.

    Raises:
        SettingsError: nothing can listen on ``host``.
    """

    def __init__(self, host: str, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._server = tcp_store.serve_store(host, 0, "run.host", timedelta(seconds=deadline_s))
        self.port: int = self._server.port

    def connect(self, host: str, session: str) -> Store:
        """Return a connection of its own, by ``host``: a store answers one question at a time."""
        return connect_store((host, self.port), session, self._deadline_s)


def connect_store(address: tuple[str, int], session: str, deadline_s: float) -> Store:
    """Return the store of one session. May block for longer than the deadline where the other process is stopped."""
    return PrefixStore(f"weights/{session}", tcp_store.connect_store(*address, timedelta(seconds=deadline_s)))
