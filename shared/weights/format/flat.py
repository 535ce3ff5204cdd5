"""One version of a policy in flat buckets on one device.

::

    trainer   fill(tensors)      void ─▶ copy, cast, checksums ─▶ begin(header) ─▶ every bucket marked
    replica   begin(header)      bucket 0 arrives ─▶ mark(0), bucket 1 arrives ─▶ mark(1), …      or void(reason)
    a Source's threads           wait(0) ─▶ send, wait(1) ─▶ send, …

A trainer's rank may hold every N-th bucket only (``share``); the others have no bytes there.

Marks are points in stream order. Storage never moves. One thread writes (fill, begin, mark, void), any number wait.
Bytes may be overwritten while being read; readers compare checksums.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.checksum import checksum, text
from penstock.shared.weights.format.layout import Header, Layout
from penstock.shared.weights.format.manifest import TensorEntry
from penstock.shared.weights.format.shares import Share
from penstock.shared.weights.stream_order import Point
from penstock.shared.weights.waits import Interrupt, uninterrupted

_INTERRUPT_EVERY_S = 0.05


class FlatSnapshot:
    """Buckets of one layout; raises WeightsError if empty."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        share: tuple[int, int] = (0, 1),
        packed: Share | None = None,
    ) -> None:
        """``share``: rank and number of ranks. ``packed``: the buckets hold this share's pieces alone, and no tensors."""
        if not layout.bucket_bytes:
            raise WeightsError("expected a layout of at least one tensor")
        self.numbers = range(share[0], len(layout.bucket_bytes), share[1])
        """Of the buckets that are here."""
        self.layout = layout
        self.layout_digest = layout.digest
        self.device = device
        self.shares = "" if packed is None else packed.digest
        """Names the shares of the ranks of a replica, of which this is one; "": whole tensors."""
        whole = layout.bucket_bytes if packed is None else packed.slots
        sizes = [size if number in self.numbers else 0 for number, size in enumerate(whole)]
        self.buckets = tuple(torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes)
        self.header: Header | None = None
        """None: no complete or arriving version."""
        self.files = ""
        """The manifest's digest of the snapshot by file that is here, complete; "": another, or none."""
        here = [entry for entry in layout.tensors if entry.bucket in self.numbers and packed is None]
        self._tensors = {entry.name: view(self.buckets[entry.bucket], entry) for entry in here}
        self._elsewhere = {entry.name for entry in layout.tensors} - self._tensors.keys()
        self._changed = threading.Condition()
        self._marked = [False] * len(self.buckets)
        self._points = [Point(device) for _ in self.buckets]
        self._reason = "it was never filled"

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)

    @property
    def whole(self) -> bool:
        """Whether every bucket that is here is complete."""
        with self._changed:
            return self.header is not None and all(self._marked[number] for number in self.numbers)

    def fill(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: PolicyVersion,
        step: int,
        join: Callable[[tuple[str, ...]], tuple[str, ...]] = tuple,
    ) -> Header:
        """Copy ``tensors`` (name, tensor on any device) in, cast to the layout's types; return the new header.

        ``join`` makes the checksums of all buckets from those of the buckets that are here.
        Iterators are consumed one tensor at a time. Waits once for the device. Raises WeightsError for tensors that do
        not fit.
        """
        self.void(f"version {version} replaced it: the pull is torn")
        self._copy(tensors)
        checksums = [checksum(self.buckets[number]) for number in self.numbers]
        values = torch.stack(checksums).cpu() if checksums else ()
        header = Header(version, step, self.layout_digest, join(tuple(text(value) for value in values)))
        self.begin(header)
        for bucket in self.numbers:
            self.mark(bucket)
        return header

    def begin(self, header: Header) -> None:
        if header.layout != self.layout_digest:
            raise WeightsError(
                f"expected a version of the layout {self.layout_digest[:12]}…, found {header.layout[:12]}…: "
                "this snapshot was made for another model"
            )
        with self._changed:
            self._marked = [False] * len(self.buckets)
            self.header, self.files = header, ""
            self._changed.notify_all()

    def mark(self, bucket: int) -> None:
        with self._changed:
            self._points[bucket].set()
            self._marked[bucket] = True
            self._changed.notify_all()

    def void(self, reason: str) -> None:
        with self._changed:
            self.header, self.files = None, ""
            self._reason = reason
            self._marked = [False] * len(self.buckets)
            self._changed.notify_all()

    def wait(
        self, bucket: int, deadline_s: float, header: Header | None = None, interrupt: Interrupt = uninterrupted
    ) -> None:
        """Wait until ``bucket`` is marked (of ``header``'s version, if given); the current stream waits for its bytes.
        Raises WeightsError: timeout, interruption, void, or another version.
        """
        expected = header if header is not None else self.header
        left_s = deadline_s
        while not self._ready(bucket, expected, min(left_s, _INTERRUPT_EVERY_S)):
            interrupt()
            left_s -= _INTERRUPT_EVERY_S
            if left_s <= 0:
                raise WeightsError(f"bucket {bucket} did not arrive within {deadline_s:g} s")

    def _ready(self, bucket: int, expected: Header | None, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.header is not expected or self._marked[bucket], timeout_s)
            self._check(expected)
            if self._marked[bucket]:
                self._points[bucket].follow()
            return self._marked[bucket]

    def _check(self, expected: Header | None) -> None:
        if self.header is None or expected is None:
            raise WeightsError(f"there is no version of the weights: {self._reason}")
        if self.header is not expected:
            raise WeightsError(
                f"expected version {expected.version} of the weights, but version {self.header.version} "
                "replaced it: the pull is torn"
            )

    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        missing = dict(self._tensors)
        with torch.no_grad():
            if isinstance(tensors, Sequence):
                here = [pair for pair in tensors if pair[0] not in self._elsewhere]
                pairs = [(_take(missing, name, tensor), tensor.detach()) for name, tensor in here]
                if pairs:
                    torch._foreach_copy_([into for into, _ in pairs], [tensor for _, tensor in pairs])
            else:
                for name, tensor in tensors:
                    if name not in self._elsewhere:
                        _take(missing, name, tensor).copy_(tensor.detach())
        if missing:
            raise WeightsError(f"tensors of the layout are missing: {', '.join(sorted(missing)[:5])}")


def view(bucket: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor at ``entry`` as a view of its bucket (uint8)."""
    flat = bucket[entry.offset : entry.offset + entry.nbytes]
    return flat.view(getattr(torch, entry.dtype)).view(entry.shape)


def _take(missing: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    into = missing.pop(name, None)
    if into is None:
        raise WeightsError(f"expected only tensors of the layout and each once, found {name!r}")
    if into.shape != tensor.shape:
        raise WeightsError(f"expected {name} of shape {tuple(into.shape)}, found {tuple(tensor.shape)}")
    return into
