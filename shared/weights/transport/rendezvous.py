"""Rendezvous of a source's groups: a TCPStore on its own address only."""

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from penstock.shared.peers import tcp_store


class Rendezvous:
    """A source's store for all sessions; raises SettingsError if ``host`` cannot be bound."""

    def __init__(self, host: str, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._server = tcp_store.serve_store(host, 0, "run.host", timedelta(seconds=deadline_s))
        self.port: int = self._server.port

    def connect(self, host: str, session: str) -> Store:
        """Return a separate connection, because a store answers one query at a time."""
        return connect_store((host, self.port), session, self._deadline_s)


def connect_store(address: tuple[str, int], session: str, deadline_s: float) -> Store:
    """Return a session's store. May exceed the deadline if the other process is stopped."""
    return PrefixStore(f"weights/{session}", tcp_store.connect_store(*address, timedelta(seconds=deadline_s)))
