"""A source's answer to a replica: the data that its workers need to join and receive a version.

Created by :class:`shared.weights.source.source.Source` (or by the puller for a file) and used by
:class:`shared.weights.receiver.receiver.Receiver` in each worker. Crosses processes as plain data.
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
    """Timeout of each wait of this pull, for a peer or a bucket."""
    session: str = ""
    """Names the two-party group, which a session keeps; a new session builds its own."""
    pull: int = 0
    """Number of the pull in its session; both sides meet under it first."""
    store: tuple[str, int] = ("", 0)
    """The session's rendezvous (a TCPStore)."""
    handles: tuple[tuple[Any, ...], ...] = ()
    """For ``ipc``: each bucket's arguments of ``torch.UntypedStorage._new_shared_cuda`` (ints and bytes)."""
    manifest_digest: str = ""
    """For ``file``: the manifest's digest."""

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
        """Return the offer from :meth:`pack`'s result."""
        host, port = fields["store"]
        return cls(
            **{name: fields[name] for name in _PLAIN},
            layout=decode_layout(fields["layout"]),
            header=decode_header(fields["header"]),
            store=(host, port),
            handles=tuple(tuple(handle) for handle in fields["handles"]),
        )
