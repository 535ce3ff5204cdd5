"""A snapshot's manifest: tensor locations and file hashes. No torch.

::

    {"format": 1, "version": 12, "step": 12,
     "tensors": [{"name": "model.norm.weight", "dtype": "bfloat16", "shape": [128], "offset": 1160, "bucket": 0}, …],
     "buckets": [{"file": "bucket-00000.safetensors", "nbytes": 2048, "sha256": "9f86…"}, …],
     "base": {"version": 11, "digest": "2c26…"}, "changes": {"file": "changes.safetensors", "nbytes": 64, …}}

Its SHA-256 is the snapshot's digest in the ledger and verifies every weight. ``base`` and ``changes`` are null unless
the snapshot's changes from an earlier one are beside it (:mod:`penstock.shared.weights.format.changes`).
"""

import dataclasses
import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError

FILE = "manifest.json"
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
class Base:
    """The snapshot from which another's changes are."""

    version: PolicyVersion
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    version: PolicyVersion
    step: int
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[BucketEntry, ...]
    base: Base | None = None
    changes: BucketEntry | None = None

    def encode(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1).encode()


def digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


def folder_name(version: PolicyVersion) -> str:
    return f"v{version:06d}"


def read(location: Path, digest: str) -> Manifest:
    """Return the manifest of the snapshot at ``location``; raises WeightsError if it does not match ``digest``."""
    try:
        data = (location / FILE).read_bytes()
    except OSError as error:
        raise WeightsError(f"could not read the snapshot at {location}: {error.strerror or error}") from error
    if (actual := hashlib.sha256(data).hexdigest()) != digest:
        raise WeightsError(
            f"expected the manifest {digest[:12]}… at {location}, found {actual[:12]}…: "
            "it is corrupt, or another trainer's snapshot of the same number"
        )
    return decode(data, str(location))


def read_bucket(location: Path, bucket: BucketEntry) -> bytearray:
    """Return a file's verified bytes; raises WeightsError."""
    path = location / bucket.file
    content = bytearray(bucket.nbytes)
    try:
        with path.open("rb") as file:
            found_bytes = os.fstat(file.fileno()).st_size
            if found_bytes != bucket.nbytes or file.readinto(content) != bucket.nbytes:
                raise WeightsError(f"expected {bucket.nbytes} bytes in {path}, found {found_bytes}: it is torn")
    except OSError as error:
        raise WeightsError(f"could not read a bucket of weights at {path}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != bucket.sha256:
        raise WeightsError(f"expected the checksum {bucket.sha256[:12]}… for {path}, found another: it is corrupt")
    return content


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
            base=None if fields.get("base") is None else Base(**fields["base"]),
            changes=None if fields.get("changes") is None else BucketEntry(**fields["changes"]),
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
    files = (*manifest.buckets, *([] if manifest.changes is None else [manifest.changes]))
    for bucket in files:
        if not isinstance(bucket.file, str) or not _FILE.fullmatch(bucket.file):
            raise WeightsError(f"expected bucket files beside the manifest in {where}, found {bucket.file!r}")
        if type(bucket.nbytes) is not int or bucket.nbytes < 0:
            raise WeightsError(f"expected the size of {bucket.file} in {where}, found {bucket.nbytes} bytes")
    if manifest.base is not None and (type(manifest.base.version) is not int or manifest.base.version < 0):
        raise WeightsError(f"expected the version of the base in {where}, found {manifest.base.version!r}")
    if len({bucket.file for bucket in files}) < len(files):
        raise WeightsError(f"expected each bucket file once in {where}, found a name twice")
