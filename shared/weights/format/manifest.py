"""A snapshot's manifest: tensor locations and file hashes. Pure data, no files, no torch.

::

    {"format": 1, "version": 12, "step": 12,
     "tensors": [{"name": "model.norm.weight", "dtype": "bfloat16", "shape": [128], "offset": 1160, "bucket": 0}, …],
     "buckets": [{"file": "bucket-00000.safetensors", "nbytes": 2048, "sha256": "9f86…"}, …]}

Its SHA-256 is the snapshot's digest in the ledger and verifies every weight.
"""

import dataclasses
import hashlib
import json
import math
import re
from typing import Any

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError

FORMAT = 1
"""Increase if older readers would misread it."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


_FILE = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor, with its byte offset in its bucket's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bucket: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class BucketEntry:
    file: str
    nbytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    version: PolicyVersion
    step: int
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]

    def encode(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1).encode()


def digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


def decode(data: bytes, where: str) -> Manifest:
    """Decode a manifest from ``where``; raises WeightsError if invalid, too new or inconsistent."""
    try:
        fields = json.loads(data)
        if fields["format"] != FORMAT:
            raise WeightsError(
                f"expected a manifest of format {FORMAT} in {where}, found {fields['format']!r}: "
                "update this service to the version that wrote it"
            )
        manifest = Manifest(
            version=PolicyVersion(int(fields["version"])),
            step=int(fields["step"]),
            tensors=tuple(_tensor(entry) for entry in fields["tensors"]),
            buckets=tuple(BucketEntry(**entry) for entry in fields["buckets"]),
        )
        _check(manifest, where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"expected a manifest in {where}, found other content: {error!r}") from error
    return manifest


def _tensor(fields: dict[str, Any]) -> TensorEntry:
    return TensorEntry(**{**fields, "shape": tuple(int(size) for size in fields["shape"])})


def _check(manifest: Manifest, where: str) -> None:
    for entry in manifest.tensors:
        if entry.dtype not in DTYPE_BYTES:
            raise WeightsError(f"expected a known number type for {entry.name} in {where}, found {entry.dtype!r}")
        bucket = manifest.buckets[entry.bucket] if 0 <= entry.bucket < len(manifest.buckets) else None
        negative = min(entry.offset, *entry.shape, 0) < 0
        if bucket is None or negative or entry.offset + entry.nbytes > bucket.nbytes:
            raise WeightsError(f"expected {entry.name} to be within its bucket in {where}")
    for bucket in manifest.buckets:
        if not isinstance(bucket.file, str) or not _FILE.fullmatch(bucket.file):
            raise WeightsError(f"expected bucket files beside the manifest in {where}, found {bucket.file!r}")
        if type(bucket.nbytes) is not int or bucket.nbytes < 0:
            raise WeightsError(f"expected the size of {bucket.file} in {where}, found {bucket.nbytes} bytes")
    if len({bucket.file for bucket in manifest.buckets}) < len(manifest.buckets):
        raise WeightsError(f"expected each bucket file once in {where}, found a name twice")
