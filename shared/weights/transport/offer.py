"""A source's answer to a replica, with which its workers receive a version. Crosses processes as plain data."""

import dataclasses
from typing import Any, Literal

from penstock.shared.weights.format.layout import Header, Layout, decode_header, decode_layout

Transport = Literal["nccl", "gloo", "ipc", "file"]
_PLAIN = ("source", "transport", "deadline_s", "session", "pull", "manifest_digest", "shares")


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    source: str
    """``host:port``, or the snapshot's folder for ``file``."""
    transport: Transport
    layout: Layout
    header: Header
    deadline_s: float
    """Timeout of each wait, for a peer or a bucket."""
    session: str = ""
    """Names the two-party group, which lives as long."""
    pull: int = 0
    """Number of the pull in its session; both sides meet under it."""
    store: tuple[str, int] = ("", 0)
    handles: tuple[tuple[Any, ...], ...] = ()
    """For ``ipc``: arguments of ``torch.UntypedStorage._new_shared_cuda`` per bucket (ints and bytes)."""
    manifest_digest: str = ""
    """For ``file``."""
    shares: str = ""
    """Of a replica whose ranks hold shares (:class:`penstock.shared.weights.format.shares.Share`): their digest. Rank r's
    share is at source r."""
    parts: tuple["Offer", ...] = ()
    """Offers of the trainer's other ranks, of the same version: bucket b is at source b mod N. Or of a replica's."""

    @property
    def sources(self) -> tuple["Offer", ...]:
        """This and its parts, by rank."""
        return (self, *self.parts)

    def pack(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "layout": self.layout.encode(),
            "header": self.header.encode(),
            "store": list(self.store),
            "handles": [list(handle) for handle in self.handles],
            "parts": [dataclasses.replace(part, layout=Layout((), ())).pack() for part in self.parts],
        }

    @classmethod
    def unpack(cls, fields: dict[str, Any]) -> "Offer":
        host, port = fields["store"]
        layout = decode_layout(fields["layout"])
        parts = (cls.unpack(part) for part in fields["parts"])
        return cls(
            **{name: fields[name] for name in _PLAIN},
            layout=layout,
            header=decode_header(fields["header"]),
            store=(host, port),
            handles=tuple(tuple(handle) for handle in fields["handles"]),
            parts=tuple(dataclasses.replace(part, layout=layout) for part in parts),
        )
