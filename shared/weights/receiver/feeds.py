"""A receiver's bucket sources, one class per transport; buckets are requested once, in order.

``start(n, into)`` begins a transfer (at most ``ahead`` outstanding), ``land(n)`` waits for it in stream order.
"""

from collections import deque
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import torch

from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.changes import Changes, apply
from penstock.shared.weights.format.flat import view
from penstock.shared.weights.format.layout import Layout
from penstock.shared.weights.format.manifest import TensorEntry
from penstock.shared.weights.format.shares import Share, pack
from penstock.shared.weights.format.snapshot import read_snapshot
from penstock.shared.weights.transport.group import Transfer, TransferGroup
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.waits import FILE_DEADLINES, Interrupt, bounded


class Feed:
    ahead = 1

    def start(self, number: int, into: torch.Tensor) -> None:
        raise NotImplementedError

    def land(self) -> None:
        """Wait for the oldest started bucket; raises WeightsError."""


class GroupFeed(Feed):
    def __init__(self, group: TransferGroup, deadline_s: float, interrupt: Interrupt, *, scattered: bool) -> None:
        self._scattered = scattered
        self.ahead = group.window
        self._group = group
        self._deadline_s = deadline_s
        self._interrupt = interrupt
        self._under_way: deque[Transfer] = deque()

    def start(self, number: int, into: torch.Tensor) -> None:
        self._under_way.append(self._group.scatter([into]) if self._scattered else self._group.broadcast(into))

    def land(self) -> None:
        """Poll for the oldest bucket."""
        self._under_way.popleft().land(self._deadline_s, self._interrupt)


class SharesFeed(Feed):
    """Buckets of several sources in turn, one at a time: kernels of several NCCL groups could wait for one another on
    the GPUs of a replica."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds
        self._landing = cycle(feeds)

    def start(self, number: int, into: torch.Tensor) -> None:
        self._feeds[number % len(self._feeds)].start(number, into)

    def land(self) -> None:
        next(self._landing).land()


class MappedFeed(Feed):
    """Buckets of a process on the same GPU."""

    def __init__(self, buckets: tuple[torch.Tensor, ...]) -> None:
        self._buckets = buckets

    def start(self, number: int, into: torch.Tensor) -> None:
        into.copy_(self._buckets[number][: into.numel()], non_blocking=True)


class FileFeed(Feed):
    """Buckets from a snapshot by file, verified by its digest; of them a ``share``, if one is given."""

    def __init__(self, offer: Offer, interrupt: Interrupt, share: Share | None = None) -> None:
        self._share, self._bucket_bytes = share, offer.layout.bucket_bytes
        self._tensors = bounded(
            lambda _: read_snapshot(Path(offer.source), offer.manifest_digest),
            FILE_DEADLINES * offer.deadline_s,
            f"the snapshot at {offer.source}",
            interrupt,
        )
        self._entries = _by_bucket(offer.layout)

    def start(self, number: int, into: torch.Tensor) -> None:
        if self._share is None:
            self._fill(number, into)
            return
        bucket = torch.empty(self._bucket_bytes[number], dtype=torch.uint8)
        self._fill(number, bucket)
        slot = torch.empty(into.shape, dtype=torch.uint8)
        pack(self._share.pieces[number], bucket, slot)
        into.copy_(slot)

    def _fill(self, number: int, into: torch.Tensor) -> None:
        into.zero_()  # checksums include the padding
        for entry in self._entries.get(number, ()):
            tensor = self._tensors.get(entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape or str(tensor.dtype) != f"torch.{entry.dtype}":
                raise WeightsError(f"expected {entry.name} as the layout says in the snapshot")
            view(into, entry).copy_(tensor)


class ChangesFeed(Feed):
    """Makes buckets of a snapshot by file of those of an earlier one, which are in place."""

    def __init__(self, offer: Offer, steps: Sequence[Changes]) -> None:
        self._steps, self._entries = steps, _by_bucket(offer.layout)

    def start(self, number: int, into: torch.Tensor) -> None:
        for entry in self._entries.get(number, ()):
            apply(self._steps, entry.name, view(into, entry))


def _by_bucket(layout: Layout) -> dict[int, list[TensorEntry]]:
    entries_by_bucket: dict[int, list[TensorEntry]] = {}
    for entry in layout.tensors:
        entries_by_bucket.setdefault(entry.bucket, []).append(entry)
    return entries_by_bucket
