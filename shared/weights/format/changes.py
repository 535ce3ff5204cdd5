"""What differs between two snapshots by file, so that a replica far from the storage reads a few percent of a version.

::

    v000011/  ──┐  compared, tensor by tensor, as the trainer writes v000012
    v000012/  ──┴▶ v000012/changes.safetensors    "positions:<name>"  int32[changed], places in the flattened tensor
                                                  "values:<name>"     bits[changed], what is there in v000012

The manifest names the base by its digest, so a replica that holds exactly these bytes makes the new version of them,
bit by bit; others read the whole. A small learning rate changes 1 to 3 % of a policy's bfloat16 values in a step.
"""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from penstock.shared.errors import WeightsError
from penstock.shared.weights.format import manifest as manifests
from penstock.shared.weights.format.manifest import Base, BucketEntry, Manifest, TensorEntry
from penstock.shared.weights.format.shares import ITEMS

log = logging.getLogger(__name__)

_FILE = "changes.safetensors"
_WORTH = 0.25
"""Of a snapshot's bytes. More changes are neither written nor read."""
_MOST_VERSIONS = 4
_MOST_VALUES = 1 << 31

Changes = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By tensor: positions (int64[changed]) and bits (an integer type of the tensor's width, [changed])."""


def write_changes(folder: Path, new: Manifest, base: Path) -> tuple[Base, BucketEntry] | None:
    """Write what differs in ``new``, whose buckets are in ``folder``, from the snapshot at ``base``, and return its
    manifest's new parts.

    None: the base is another model's or unreadable, or most has changed.
    """
    try:
        data = (base / manifests.FILE).read_bytes()
        old = manifests.decode(data, str(base))
        if [_kind(entry) for entry in old.tensors] != [_kind(entry) for entry in new.tensors]:
            return None
        changed, left_bytes = dict[str, torch.Tensor](), _WORTH * _nbytes(new)
        for before, after in zip(old.tensors, new.tensors, strict=True):
            bits = _bits(folder, new, after)
            positions = (_bits(base, old, before) != bits).nonzero().flatten()
            left_bytes -= positions.numel() * (4 + bits.element_size())
            if left_bytes < 0 or bits.numel() >= _MOST_VALUES:
                return None
            if positions.numel():
                changed |= {f"positions:{after.name}": positions.int(), f"values:{after.name}": bits[positions]}
        save_file(changed, folder / _FILE)
        (folder / _FILE).chmod(0o600)
        with (folder / _FILE).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    except (OSError, SafetensorError, WeightsError) as error:
        log.warning("a snapshot has no changes beside it", extra={"folder": str(folder), "error": str(error)})
        (folder / _FILE).unlink(missing_ok=True)
        return None
    entry = BucketEntry(_FILE, (folder / _FILE).stat().st_size, sha256)
    return Base(old.version, manifests.digest(data)), entry


def read_changes(location: Path, digest: str, held: str) -> Sequence[Changes]:
    """Return what makes the snapshot with the manifest ``digest`` at ``location`` of the one with ``held``, oldest first.

    Nothing, if it is not to be had for less than the whole. Raises WeightsError for what was damaged.
    """
    newest_first: list[tuple[Path, Manifest, BucketEntry]] = []
    nbytes = 0
    while len(newest_first) < _MOST_VERSIONS:
        manifest = manifests.read(location, digest)
        base, entry = manifest.base, manifest.changes
        nbytes += 0 if entry is None else entry.nbytes
        if base is None or entry is None or nbytes > _WORTH * _nbytes(manifest):
            return ()
        newest_first.append((location, manifest, entry))
        if base.digest == held:
            return [_read(*each) for each in reversed(newest_first)]
        location, digest = location.parent / manifests.folder_name(base.version), base.digest
        if not (location / manifests.FILE).is_file():
            return ()
    return ()


def apply(steps: Sequence[Changes], name: str, tensor: torch.Tensor) -> None:
    """Make ``tensor``, a view of the held version's bytes on any device, the new version's."""
    bits = tensor.view(-1).view(ITEMS[tensor.element_size()])
    for changes in steps:
        if name in changes:
            positions, values = changes[name]
            bits[positions.to(bits.device)] = values.to(bits.device)


def _read(location: Path, manifest: Manifest, entry: BucketEntry) -> Changes:
    content = manifests.read_bucket(location, entry)
    try:
        arrays = load(bytes(content))
    except SafetensorError as error:
        raise WeightsError(f"expected changes of weights in {location / entry.file}: {error}") from error
    kinds = {f"positions:{tensor.name}": tensor for tensor in manifest.tensors}
    changes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, positions in arrays.items():
        if key.startswith("values:"):
            continue
        tensor, values = kinds.get(key), arrays.get("values:" + key.removeprefix("positions:"))
        if tensor is None or values is None or not _fits(positions, values, tensor):
            raise WeightsError(f"expected changes of a tensor of the snapshot at {location}, found {key[:80]!r}")
        changes[tensor.name] = positions.long(), values
    return changes


def _fits(positions: torch.Tensor, values: torch.Tensor, tensor: TensorEntry) -> bool:
    width = manifests.DTYPE_BYTES[tensor.dtype]
    if positions.dtype != torch.int32 or positions.dim() != 1 or values.dtype != ITEMS[width] or not positions.numel():
        return False
    within = int(positions.min()) >= 0 and int(positions.max()) < tensor.nbytes // width
    return within and values.shape == positions.shape


def _kind(entry: TensorEntry) -> tuple[str, str, tuple[int, ...]]:
    return entry.name, entry.dtype, entry.shape


def _nbytes(manifest: Manifest) -> int:
    return sum(entry.nbytes for entry in manifest.tensors)


def _bits(folder: Path, manifest: Manifest, entry: TensorEntry) -> torch.Tensor:
    """Return a tensor's bits, read: storage that fails under a map would end the process."""
    content = bytearray(entry.nbytes)
    with (folder / manifest.buckets[entry.bucket].file).open("rb") as file:
        file.seek(entry.offset)
        if file.readinto(content) != entry.nbytes:
            raise WeightsError(f"expected {entry.name} in the snapshot at {folder}: it is torn")
    kind = ITEMS[manifests.DTYPE_BYTES[entry.dtype]]
    return torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)
