"""A rank's share of a layout: the bytes that it needs, packed bucket by bucket.

A :class:`Piece` is a strided view of a bucket. A rank's pieces of a bucket are packed in order, each at a multiple of 16
bytes, into a slot of the same size for every rank::

    bucket   ░░████░░████░░░░██   ──pack──▶   slot   ████████▪▪██▪▪

A header's checksums stay the proof of every byte. They are sums over a bucket's words at their places, and zeros add
nothing. So each rank spreads what it received over an empty bucket and sums it, once per **class** (the set of ranks that
hold the same pieces). Ranks of a class must agree, and the sum over the classes is the header's checksum.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.layout import Layout

_ALIGNMENT_BYTES = 16
_MAX_DIMENSIONS = 8
ITEMS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer types by their bytes, widest first."""

Sums: TypeAlias = Mapping[str, Sequence[str]]
"""By class, the checksum (hex) of each bucket."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Runs of ``run`` bytes from byte ``offset`` on; ``dims`` are (number, stride in bytes), outermost first."""

    offset: int
    run: int
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.run * math.prod(size for size, _ in self.dims)

    @property
    def item(self) -> torch.dtype:
        """The widest number type that fits: copy kernels cost per item."""
        whole = math.gcd(self.offset, self.run, *(stride for _, stride in self.dims))
        return next(dtype for size, dtype in ITEMS.items() if whole % size == 0)

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return this view of ``bucket`` (uint8)."""
        size = self.item.itemsize
        flat = bucket.view(self.item)
        strides = (*(stride // size for _, stride in self.dims), 1)
        return flat.as_strided(self._shape, strides, flat.storage_offset() + self.offset // size)

    def packed(self, slot: torch.Tensor, place: int) -> torch.Tensor:
        """Return its packed form at byte ``place`` of ``slot`` (uint8)."""
        return slot[place : place + self.nbytes].view(self.item).view(self._shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        return (*(size for size, _ in self.dims), self.run // self.item.itemsize)

    def lies_within(self, bucket_bytes: int) -> bool:
        numbers = (self.run, *(number for pair in self.dims for number in pair))
        last = self.offset + sum((size - 1) * stride for size, stride in self.dims) + self.run
        return self.offset >= 0 and min(numbers) >= 1 and len(self.dims) <= _MAX_DIMENSIONS and last <= bucket_bytes


Pieces: TypeAlias = tuple[tuple[Piece, ...], ...]
"""A rank's pieces of each bucket, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What a rank receives of a layout."""

    pieces: Pieces
    classes: tuple[tuple[str, ...], ...]
    """The class of each piece."""
    slots: tuple[int, ...]
    """Bytes of each bucket's slot, the same for every rank of the replica."""
    digest: str
    """Names the shares of all ranks of the replica."""

    @property
    def nbytes(self) -> int:
        return sum(self.slots)

    @property
    def names(self) -> list[str]:
        """The classes of which this rank has a piece."""
        return sorted({name for bucket in self.classes for name in bucket})

    def spread(self, number: int, name: str, slot: torch.Tensor, empty: torch.Tensor) -> bool:
        """Copy a class's pieces from ``slot`` to their places in ``empty``, zeroed here; return whether there are any."""
        placed = zip(self.pieces[number], places(self.pieces[number]), self.classes[number], strict=True)
        held = [(piece, place) for piece, place, of in placed if of == name]
        if held:
            empty.zero_()
            copy([(piece.of(empty), piece.packed(slot, place)) for piece, place in held])
        return bool(held)


def copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Enqueue (destination, source) copies, by number type."""
    for dtype in ITEMS.values():
        alike = [pair for pair in pairs if pair[0].dtype == dtype]
        if alike:
            torch._foreach_copy_([into for into, _ in alike], [of for _, of in alike], non_blocking=True)


def places(pieces: Sequence[Piece]) -> Iterator[int]:
    """Yield each piece's first byte in its slot."""
    place = 0
    for piece in pieces:
        yield place
        place += _aligned(piece.nbytes)


def slot_bytes(ranks: Sequence[Pieces]) -> tuple[int, ...]:
    """Return each bucket's slot size: the largest of the ranks'."""
    packed = [[sum(_aligned(piece.nbytes) for piece in bucket) for bucket in pieces] for pieces in ranks]
    return tuple(map(max, *packed)) if len(packed) > 1 else tuple(packed[0])


def pack(pieces: Sequence[Piece], bucket: torch.Tensor, slot: torch.Tensor) -> None:
    """Enqueue the copies of ``pieces`` of ``bucket`` into ``slot``."""
    copy([(piece.packed(slot, place), piece.of(bucket)) for piece, place in zip(pieces, places(pieces), strict=True)])


def digest(ranks: Sequence[Pieces]) -> str:
    return hashlib.sha256(b"\n".join(encode(pieces) for pieces in ranks)).hexdigest()


def encode(pieces: Pieces) -> bytes:
    rows = [[[piece.offset, piece.run, *map(list, piece.dims)] for piece in bucket] for bucket in pieces]
    return json.dumps(rows, separators=(",", ":")).encode()


def decode(data: bytes, layout: Layout) -> Pieces:
    """Raise WeightsError if invalid, outside ``layout``, or of more bytes than its buckets."""
    try:
        pieces = tuple(tuple(map(_piece, bucket)) for bucket in json.loads(data))
        for bucket, nbytes in zip(pieces, layout.bucket_bytes, strict=True):
            fits = all(piece.lies_within(nbytes) for piece in bucket)
            if not fits or sum(piece.nbytes for piece in bucket) > nbytes:
                raise ValueError("pieces outside their bucket")
    except (ValueError, TypeError, AttributeError) as error:
        raise WeightsError(f"expected the pieces of a rank's share, found other content: {error!r}") from error
    return pieces


def _piece(row: Any) -> Piece:
    offset, run, *dims = row
    numbers = [offset, run, *(number for pair in dims for number in pair)]
    if any(type(number) is not int for number in numbers):
        raise ValueError("a place that is no whole number")
    return Piece(offset, run, tuple((size, stride) for size, stride in dims))


def check_sums(ranks: Sequence[Sums], checksums: Sequence[str], source: str) -> None:
    """Compare all ranks' sums with a header's checksums; raises WeightsError."""
    by_class: dict[str, Sequence[str]] = {}
    for sums in ranks:
        for name, values in sums.items():
            if by_class.setdefault(name, values) != values:
                raise WeightsError(f"ranks {name} received different bytes of the same weights from {source}: damaged")
    totals = [sum(_number(values[bucket]) for values in by_class.values()) for bucket in range(len(checksums))]
    wrong = [number for number, total in enumerate(totals) if total % (1 << 64) != _number(checksums[number])]
    if wrong:
        raise WeightsError(
            f"expected the checksum of the source {source} for bucket {wrong[0]}, found another sum over the ranks' shares, "
            f"as for {len(wrong)} of {len(checksums)} buckets: it was overwritten while it was sent, or damaged"
        )


def _number(checksum: str) -> int:
    return int.from_bytes(bytes.fromhex(checksum), "little")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
