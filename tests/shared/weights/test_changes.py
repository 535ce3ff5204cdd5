"""Laws of what differs between snapshots by file: of an earlier version's bytes it makes the new one's, or nothing."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.changes import read_changes
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.shares import Piece, Share
from penstock.shared.weights.format.snapshot import keep_newest, write_snapshot
from penstock.shared.weights.receiver.puller import file_offer
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.transport.offer import Offer
from tests.conftest import PATIENCE_S

CPU = torch.device("cpu")
Tensors = list[tuple[str, torch.Tensor]]


class Replica:
    """One shadow, which receives versions by file."""

    def __init__(self) -> None:
        self._receiver = Receiver(1, 1, CPU)
        self.shadow: FlatSnapshot | None = None

    def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        if self.shadow is None or self.shadow.layout != offer.layout:
            self.shadow = FlatSnapshot(offer.layout, CPU)
        self._receiver.receive(offer, self.shadow)
        return {name: tensor.clone() for name, tensor in self.shadow.tensors().items()}


def initial(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    draw = torch.Generator().manual_seed(1)
    shapes = {"embed": (300, 40), "norm": (40,), "scale": (), "head": (7, 3)}
    return [(name, torch.randn(shape, generator=draw).to(dtype)) for name, shape in shapes.items()] + [
        ("table", torch.arange(900))
    ]


def step(tensors: Tensors, seed: int, part: float = 0.02) -> Tensors:
    """Return them with about ``part`` of the values changed, signs of zeros and integers too."""
    draw = torch.Generator().manual_seed(seed)
    return [(name, torch.where(torch.rand(old.shape, generator=draw) < part, -(old + 1), old)) for name, old in tensors]


def publish(folder: Path, version: int, tensors: Tensors) -> Offer:
    written = write_snapshot(folder, PolicyVersion(version), version, tensors, None, changes=True)
    record = PolicyRecord(PolicyVersion(version), None, version, 0.0, written.digest, str(written.location))
    return file_offer(record, PATIENCE_S)


def without_buckets(offer: Offer) -> None:
    for bucket in Path(offer.source).glob("bucket-*"):
        bucket.unlink()


def equal(actual: dict[str, torch.Tensor], expected: Tensors) -> bool:
    """Whether the bytes are equal."""
    return list(actual) == [name for name, _ in expected] and all(
        torch.equal(actual[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
        for name, tensor in expected
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_replica_makes_the_next_versions_of_what_it_holds_without_reading_them_whole(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    replica, tensors = Replica(), initial(dtype)
    replica.receive(publish(tmp_path, 1, tensors))
    for version in (2, 3):
        tensors = step(tensors, version)
        offer = publish(tmp_path, version, tensors)
        before = {bucket: bucket.rename(tmp_path / bucket.name) for bucket in Path(offer.source).glob("bucket-*")}
        assert equal(replica.receive(offer), tensors)
        for bucket, aside in before.items():  # the trainer compares the next version with them
            aside.rename(bucket)


def test_a_replica_that_missed_versions_takes_their_changes_in_order(tmp_path: Path) -> None:
    replica, versions = Replica(), [initial()]
    replica.receive(publish(tmp_path, 1, versions[0]))
    for number in (2, 3, 4):
        versions.append(step(versions[-1], number))
        offer = publish(tmp_path, number, versions[-1])
    without_buckets(offer)
    assert equal(replica.receive(offer), versions[-1])
    assert replica.shadow is not None
    assert replica.shadow.header == FlatSnapshot(offer.layout, CPU).fill(versions[-1], PolicyVersion(4), 4)


def _new(_: Replica, folder: Path) -> Replica:
    return Replica()


def _too_far(replica: Replica, folder: Path) -> Replica:
    keep_newest(folder, 1)
    return replica


def _pulled(replica: Replica, folder: Path) -> Replica:
    assert replica.shadow is not None
    replica.shadow.fill(initial(), PolicyVersion(1), 1)  # of that number, but not by file
    return replica


def _failed(replica: Replica, folder: Path) -> Replica:
    assert replica.shadow is not None
    replica.shadow.void("a pull failed")
    return replica


@pytest.mark.parametrize("happens", [_new, _too_far, _pulled, _failed])
def test_whoever_does_not_hold_the_base_reads_the_whole(
    tmp_path: Path, happens: Callable[[Replica, Path], Replica]
) -> None:
    replica, first = Replica(), initial()
    replica.receive(publish(tmp_path, 1, first))
    publish(tmp_path, 2, step(first, 2))
    third = step(step(first, 2), 3)
    offer = publish(tmp_path, 3, third)
    replica = happens(replica, tmp_path)
    assert equal(replica.receive(offer), third)
    fourth = step(third, 4)
    offer = publish(tmp_path, 4, fourth)
    without_buckets(offer)
    assert equal(replica.receive(offer), fourth)  # from there on it holds a base


@pytest.mark.parametrize("others", [step(initial(), 2, 0.9), [*initial()[:-1], ("table", torch.arange(901))]])
def test_changes_of_most_values_or_from_another_model_are_not_written(tmp_path: Path, others: Tensors) -> None:
    replica = Replica()
    replica.receive(publish(tmp_path, 1, initial()))
    offer = publish(tmp_path, 2, others)
    assert not (Path(offer.source) / "changes.safetensors").exists()
    assert equal(replica.receive(offer), others)


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [_flipped, Path.unlink, lambda file: file.write_bytes(b"")])
def test_with_damaged_changes_the_whole_is_read(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    replica, first = Replica(), initial()
    replica.receive(publish(tmp_path, 1, first))
    offer = publish(tmp_path, 2, step(first, 2))
    harm(Path(offer.source) / "changes.safetensors")
    assert equal(replica.receive(offer), step(first, 2))


def test_what_is_no_longer_as_it_was_received_is_not_changed_but_replaced(tmp_path: Path) -> None:
    replica, first = Replica(), initial()
    replica.receive(publish(tmp_path, 1, first))
    assert replica.shadow is not None
    replica.shadow.tensors()["norm"].zero_()
    assert equal(replica.receive(publish(tmp_path, 2, step(first, 2))), step(first, 2))


def test_changes_that_cannot_be_written_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    publish(tmp_path, 1, initial())
    monkeypatch.setattr("penstock.shared.weights.format.changes.save_file", full)
    offer = publish(tmp_path, 2, step(initial(), 2))
    assert not (Path(offer.source) / "changes.safetensors").exists()
    assert equal(Replica().receive(offer), step(initial(), 2))


def _forged(offer: Offer, change: Callable[[dict[str, torch.Tensor]], None]) -> Offer:
    """Replace the changes and the digests above them, as who writes to the storage can."""
    folder = Path(offer.source)
    arrays = load_file(folder / "changes.safetensors")
    change(arrays)
    save_file(arrays, folder / "changes.safetensors")
    content = (folder / "changes.safetensors").read_bytes()
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["changes"] |= {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    data = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(data)
    record = PolicyRecord(PolicyVersion(2), None, 2, 0.0, hashlib.sha256(data).hexdigest(), str(folder))
    return file_offer(record, PATIENCE_S)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays["positions:embed"].add_(12_000),
        lambda arrays: arrays["positions:embed"].sub_(12_000),
        lambda arrays: arrays.update({"positions:other": arrays.pop("positions:embed")}),
        lambda arrays: arrays.pop("values:embed"),
        lambda arrays: arrays.update({"values:embed": arrays["values:embed"].int()}),
        lambda arrays: arrays.update({"positions:embed": arrays["positions:embed"].short()}),
        lambda arrays: arrays.update({"values:embed": arrays["values:embed"][1:].clone()}),
    ],
)
def test_changes_that_do_not_fit_the_snapshot_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    replica, first = Replica(), initial()
    replica.receive(publish(tmp_path, 1, first))
    offer = _forged(publish(tmp_path, 2, step(first, 2)), change)
    assert replica.shadow is not None
    with pytest.raises(WeightsError, match="expected changes of a tensor of the snapshot"):
        read_changes(Path(offer.source), offer.manifest_digest, replica.shadow.files)
    assert equal(replica.receive(offer), step(first, 2))


def test_ranks_that_keep_a_share_read_the_whole(tmp_path: Path) -> None:
    first = initial()
    offers: Sequence[Offer] = publish(tmp_path, 1, first), publish(tmp_path, 2, step(first, 2))
    sizes = offers[0].layout.bucket_bytes
    share = Share(tuple((Piece(0, size),) for size in sizes), (("all",),) * len(sizes), sizes, "the only rank's")
    shadow, receiver = FlatSnapshot(offers[0].layout, CPU, packed=share), Receiver(1, 1, CPU)
    for offer in offers:
        receiver.receive(offer, shadow, share)
    whole = FlatSnapshot(offers[1].layout, CPU)
    whole.fill(step(first, 2), PolicyVersion(2), 2)
    assert all(torch.equal(a, b) for a, b in zip(shadow.buckets, whole.buckets, strict=True))
