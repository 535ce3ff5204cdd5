"""Where the groups of a source meet: a TCPStore in the source's process, on the source's own address alone."""

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shared.weights.sockets import listen


class Rendezvous:
    """The store of one source, for all of its sessions.

    Raises:
        SettingsError: nothing can listen on ``host``.
    """

    def __init__(self, host: str, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        listener = listen(host, 0)
        self.port: int = listener.getsockname()[1]
        self._server = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
            master_listen_fd=listener.detach(),
        )

    def connect(self, host: str, session: str) -> Store:
        """Return a connection of its own, by ``host``: a store answers one question at a time."""
        return connect_store((host, self.port), session, self._deadline_s)


def connect_store(address: tuple[str, int], session: str, deadline_s: float) -> Store:
    """Return the store of one session. May block for longer than the deadline where the other process is stopped."""
    host, port = address
    timeout = timedelta(seconds=deadline_s)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(f"weights/{session}", store)
