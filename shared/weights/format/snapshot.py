"""Atomic snapshots by file.

::

    <folder>/.v000012.4711.tmp/   being written by process 4711
    <folder>/v000012/             committed, by the one rename
        manifest.json             its SHA-256 is the snapshot's digest in the ledger
        bucket-00000.safetensors  at most BUCKET_BYTES each, except for a larger tensor
        ...
        changes.safetensors       what differs from an earlier snapshot

An adapter's files have PEFT's names, for inference engines::

    <folder>/v000012/
        manifest.json, adapter_model.safetensors, adapter_config.json

Readers use only verified bytes; torn, replaced or deleted files raise :class:`WeightsError`. Tied parameters are stored
once, under the first name; floating point tensors are cast to ``dtype``.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.files import durable
from penstock.shared.weights.format import manifest as manifests
from penstock.shared.weights.format.changes import write_changes
from penstock.shared.weights.format.manifest import BucketEntry, Manifest, TensorEntry

BUCKET_BYTES = 1 << 30
_READERS = 4
ADAPTER = "adapter_model.safetensors"
_COMMITTED = re.compile(r"v(\d{6,})")
_UNFINISHED = re.compile(r"\.v(\d{6,})\.[^/]*\.tmp")


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    location: Path
    digest: str
    nbytes: int


def write_snapshot(
    folder: Path,
    version: PolicyVersion,
    step: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
    *,
    changes: bool = False,
) -> Snapshot:
    """Write (Hugging Face name, tensor) ``tensors`` atomically as ``folder``/v<version>, replacing a dead trainer's.

    ``tensors`` is consumed one at a time. None as ``dtype`` keeps types. With ``changes``, what differs from the newest
    earlier snapshot in ``folder`` is written beside them, if that is little.
    """

    def fill(beside: Path) -> Manifest:
        manifest = _write_buckets(beside, version, step, tensors, dtype)
        bases = [path for number, path in committed(folder) if number < version] if changes else []
        written = write_changes(beside, manifest, bases[-1]) if bases else None
        if written is None:
            return manifest
        return dataclasses.replace(manifest, base=written[0], changes=written[1])

    return _write_whole(folder, version, fill)


def write_adapter(
    folder: Path,
    version: PolicyVersion,
    step: int,
    factors: Iterable[tuple[str, torch.Tensor]],
    configuration: bytes,
    dtype: torch.dtype,
) -> Snapshot:
    """Write an adapter's ``factors`` (PEFT names) atomically as ``folder``/v<version>; raises WeightsError.

    ``configuration`` is the content of adapter_config.json.
    """

    def fill(beside: Path) -> Manifest:
        tensors = {name: _copied(tensor, dtype) for name, tensor in factors}
        bucket, offsets = _write_bucket(beside / ADAPTER, tensors)
        entries = [TensorEntry(n, dtype_name(t.dtype), tuple(t.shape), offsets[n], 0) for n, t in tensors.items()]
        _write(beside / "adapter_config.json", configuration)
        digest = hashlib.sha256(configuration).hexdigest()
        settings = BucketEntry("adapter_config.json", len(configuration), digest)
        return Manifest(version=version, step=step, tensors=tuple(entries), buckets=(bucket, settings))

    return _write_whole(folder, version, fill)


def _write_whole(folder: Path, version: PolicyVersion, fill: Callable[[Path], Manifest]) -> Snapshot:
    location = folder / manifests.folder_name(version)
    unfinished = folder / f".{location.name}.{os.getpid()}.tmp"
    try:
        _make_private(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        manifest = fill(unfinished)
        data = manifest.encode()
        _write(unfinished / manifests.FILE, data)
        durable.flush(unfinished)
        durable.replace_folder(unfinished, location)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise WeightsError(
            f"could not write the snapshot {location}: {error}: free disk space there or change weights.folder"
        ) from error
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    nbytes = len(data) + sum(bucket.nbytes for bucket in (*manifest.buckets, manifest.changes) if bucket is not None)
    return Snapshot(location=location, digest=manifests.digest(data), nbytes=nbytes)


def read_snapshot(location: Path, digest: str) -> dict[str, torch.Tensor]:
    """Return the snapshot's tensors by name, on the CPU; raises WeightsError if it does not match ``digest``."""
    manifest = manifests.read(location, digest)
    with ThreadPoolExecutor(_READERS) as pool:  # hashing dominates and releases the GIL
        contents = pool.map(lambda bucket: manifests.read_bucket(location, bucket), manifest.buckets)
        buckets = [torch.frombuffer(content, dtype=torch.uint8) for content in contents]
    return {entry.name: _view(buckets[entry.bucket], entry) for entry in manifest.tensors}


def committed(folder: Path) -> list[tuple[PolicyVersion, Path]]:
    """Return committed snapshots, oldest first."""
    return [(PolicyVersion(number), path) for number, path in sorted(_numbered(folder, _COMMITTED))]


def keep_newest(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest snapshots, and unfinished copies of existing versions."""
    whole = committed(folder)
    newest = whole[-1][0] if whole else -1
    old = [path for _, path in whole[: max(0, len(whole) - keep)]]
    stale = [path for number, path in _numbered(folder, _UNFINISHED) if number <= newest]
    for path in (*old, *stale):
        shutil.rmtree(path, ignore_errors=True)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    with contextlib.suppress(FileNotFoundError):
        names = [(pattern.fullmatch(path.name), path) for path in folder.iterdir()]
        return [(int(match[1]), path) for match, path in names if match is not None]
    return []


# -------------------------------------------------------------------- writing


def _write_buckets(
    folder: Path,
    version: PolicyVersion,
    step: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
) -> Manifest:
    entries: dict[str, TensorEntry] = {}
    buckets: list[BucketEntry] = []
    held: dict[str, torch.Tensor] = {}
    held_bytes = 0

    def flush() -> None:
        bucket, offsets = _write_bucket(folder / f"bucket-{len(buckets):05d}.safetensors", held)
        for name, tensor in held.items():
            entries[name] = TensorEntry(
                name, dtype_name(tensor.dtype), tuple(tensor.shape), offsets[name], len(buckets)
            )
        buckets.append(bucket)
        held.clear()

    for name, tensor in tensors:
        if name in held or name in entries:
            raise WeightsError(f"expected every tensor of a snapshot once, found {name!r} twice")
        copied = _copied(tensor, dtype)
        if held and held_bytes + copied.nbytes > BUCKET_BYTES:
            flush()
            held_bytes = 0
        held[name] = copied
        held_bytes += copied.nbytes
    if held:
        flush()
    return Manifest(version=version, step=step, tensors=tuple(entries.values()), buckets=tuple(buckets))


def _copied(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=target, copy=True).contiguous()


def _write_bucket(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[BucketEntry, dict[str, int]]:
    save_file(tensors, path)
    path.chmod(0o600)
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    offsets = {name: 8 + header_bytes + int(header[name]["data_offsets"][0]) for name in tensors}
    return BucketEntry(path.name, path.stat().st_size, sha256), offsets


def _make_private(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb", opener=_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# -------------------------------------------------------------------- reading


def _view(bucket: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    flat = bucket[entry.offset : entry.offset + entry.nbytes]
    return flat.view(getattr(torch, entry.dtype)).view(entry.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
