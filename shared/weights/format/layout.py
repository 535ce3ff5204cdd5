"""A policy's layout in flat memory, and a version's checksums. Pure data, no torch.

A layout belongs to a model, a header to a version of it::

    Layout {"format": 1, "tensors": [{"name", "dtype", "shape", "offset", "bucket"}, …], "bucket_bytes": [268435456, …]}
    Header {"format": 1, "version": 12, "step": 12, "layout": <digest>, "checksums": ["9f86…", …]}

Layouts are sent once per puller and model. The header's SHA-256 is the ledger's ``manifest_digest`` and verifies all
weights of a pull.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format import BUCKET_BYTES
from penstock.shared.weights.format.manifest import DTYPE_BYTES, FORMAT, TensorEntry

ALIGNMENT_BYTES = 256
"""Tensor alignment within a bucket, for the widest copy kernels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Tensors by Hugging Face name, in buckets of ``bucket_bytes[i]`` bytes."""

    tensors: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.bucket_bytes)

    def encode(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.encode()).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """A version of a layout, with bucket checksums (hex)."""

    version: PolicyVersion
    step: int
    layout: str
    checksums: tuple[str, ...]

    def encode(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.encode()).hexdigest()


def plan_layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]], bucket_bytes: int = BUCKET_BYTES) -> Layout:
    """Raise WeightsError for duplicate names or unknown types."""
    entries: dict[str, TensorEntry] = {}
    sizes: list[int] = []
    for name, dtype, shape in tensors:
        if name in entries:
            raise WeightsError(f"expected every tensor of a policy once, found {name!r} twice")
        if dtype not in DTYPE_BYTES:
            raise WeightsError(f"expected a known number type for {name}, found {dtype!r}")
        entry = TensorEntry(name, dtype, tuple(shape), 0, 0)
        start = -(-sizes[-1] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if sizes else 0
        if not sizes or start + entry.nbytes > bucket_bytes:
            sizes.append(0)
            start = 0
        entries[name] = dataclasses.replace(entry, offset=start, bucket=len(sizes) - 1)
        sizes[-1] = start + entry.nbytes
    return Layout(tuple(entries.values()), tuple(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes))


def decode_layout(data: bytes) -> Layout:
    """Raise WeightsError if invalid, or if tensors exceed their buckets."""
    try:
        fields = json.loads(data)
        tensors = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields["tensors"])
        layout = Layout(tensors, tuple(int(size) for size in fields["bucket_bytes"]))
        if fields["format"] != FORMAT or not all(_lies_within(entry, layout.bucket_bytes) for entry in tensors):
            raise ValueError("another format, or tensors outside their buckets")
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"expected a layout of weights from the source, found other content: {error!r}") from error
    return layout


def _lies_within(entry: TensorEntry, bucket_bytes: tuple[int, ...]) -> bool:
    known = entry.dtype in DTYPE_BYTES and 0 <= entry.bucket < len(bucket_bytes) and entry.offset >= 0
    return known and entry.offset + entry.nbytes <= bucket_bytes[entry.bucket]


def decode_header(data: bytes) -> Header:
    try:
        fields = json.loads(data)
        if fields.pop("format") != FORMAT:
            raise ValueError("another format")
        return Header(**{**fields, "checksums": tuple(str(text) for text in fields["checksums"])})
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"expected a header of weights from the source, found other content: {error!r}") from error
