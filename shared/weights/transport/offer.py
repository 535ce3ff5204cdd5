"""What a source of weights says to a replica that asked for a version: all that its workers need to join and receive.

Made by :class:`shared.weights.source.source.Source` (or from a file by the puller), handed through the engine to every worker of
the replica, and used there by :class:`shared.weights.receiver.receiver.Receiver`. It crosses process borders as plain data.
"""

import dataclasses
from typing import Any, Literal

from shared.weights.format.layout import Header, Layout, decode_header, decode_layout

Transport = Literal["nccl", "gloo", "ipc", "file"]
_PLAIN = ("source", "transport", "deadline_s", "session", "pull", "manifest_digest")


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """One version at one source."""

    source: str
    """``host:port`` of the source's server, or the snapshot's folder for ``file``."""
    transport: Transport
    layout: Layout
    header: Header
    deadline_s: float
    """No wait of this pull may take longer: for a peer, for a bucket."""
    session: str = ""
    """Names the two-party group. The same session goes on with the group that it has; a new one builds its own."""
    pull: int = 0
    """Counts the pulls of a session: both sides meet under this number before any byte moves."""
    store: tuple[str, int] = ("", 0)
    """Where the session's rendezvous is (a TCPStore)."""
    handles: tuple[tuple[Any, ...], ...] = ()
    """For ``ipc``: of each bucket, what ``torch.UntypedStorage._new_shared_cuda`` takes (ints and bytes)."""
    manifest_digest: str = ""
    """For ``file``: the digest of the folder's manifest."""

    def pack(self) -> dict[str, Any]:
        """Return this as bytes, numbers, texts and lists of them."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "layout": self.layout.encode(),
            "header": self.header.encode(),
            "store": list(self.store),
            "handles": [list(handle) for handle in self.handles],
        }

    @classmethod
    def unpack(cls, fields: dict[str, Any]) -> "Offer":
        """Return the offer in what :meth:`pack` gave."""
        host, port = fields["store"]
        return cls(
            **{name: fields[name] for name in _PLAIN},
            layout=decode_layout(fields["layout"]),
            header=decode_header(fields["header"]),
            store=(host, port),
            handles=tuple(tuple(handle) for handle in fields["handles"]),
        )
