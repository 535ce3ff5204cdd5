"""Laws of weight snapshots by file."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format import snapshot
from penstock.shared.weights.format.snapshot import Snapshot, keep_newest, read_snapshot, write_snapshot

TENSORS = {
    "model.embed.weight": torch.tensor([[0.5, -1.0, 2.0], [3.0, 4.0, -0.25]]),
    "model.norm.weight": torch.tensor([1.0, 1.5, 0.0]),
    "model.positions": torch.tensor([7, 8], dtype=torch.int64),
    "lm_head.weight": torch.tensor([[1.0], [2.0]]),
}


def write(folder: Path, version: int = 12, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Snapshot:
    tensors = [(name, tensor * scale if tensor.is_floating_point() else tensor) for name, tensor in TENSORS.items()]
    return write_snapshot(folder, PolicyVersion(version), version, tensors, dtype)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_bit_by_bit_in_the_same_order(tmp_path: Path) -> None:
    written = write(tmp_path)
    assert written.location == tmp_path / "v000012"
    snapshot = read_snapshot(written.location, written.digest)
    assert list(snapshot) == list(TENSORS)
    assert all(
        torch.equal(snapshot[name], tensor) and snapshot[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_floating_point_is_written_in_the_dtype_asked_for_and_the_rest_as_it_is(tmp_path: Path) -> None:
    written = write(tmp_path, dtype=torch.bfloat16)
    snapshot = read_snapshot(written.location, written.digest)
    assert snapshot["model.norm.weight"].dtype == torch.bfloat16
    assert snapshot["model.norm.weight"].tolist() == [1.0, 1.5, 0.0]
    assert snapshot["model.positions"].dtype == torch.int64


def test_the_digest_is_that_of_the_manifest_and_the_manifest_says_where_every_byte_lies(tmp_path: Path) -> None:
    written = write(tmp_path, dtype=torch.bfloat16)
    data = (written.location / "manifest.json").read_bytes()
    assert written.digest == hashlib.sha256(data).hexdigest()
    fields = json.loads(data)
    assert (fields["format"], fields["version"], fields["step"]) == (1, 12, 12)
    entry = next(entry for entry in fields["tensors"] if entry["name"] == "model.norm.weight")
    assert (entry["dtype"], entry["shape"], entry["bucket"]) == ("bfloat16", [3], 0)
    bucket = (written.location / fields["buckets"][0]["file"]).read_bytes()
    assert bucket[entry["offset"] : entry["offset"] + 6] == bytes.fromhex("803f c03f 0000")  # 1.0 1.5 0.0
    assert fields["buckets"][0]["sha256"] == hashlib.sha256(bucket).hexdigest()
    assert written.nbytes == len(data) + len(bucket)


def test_a_bucket_ends_before_it_grows_over_its_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BUCKET_BYTES", 30)  # 24 | 12 + 16 | 8 bytes
    written = write(tmp_path)
    assert names(written.location) == [f"bucket-0000{n}.safetensors" for n in range(3)] + ["manifest.json"]
    actual = read_snapshot(written.location, written.digest)
    assert all(torch.equal(actual[name], tensor) for name, tensor in TENSORS.items())


def test_a_generator_may_reuse_the_tensor_that_it_gave(tmp_path: Path) -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        space = torch.zeros(2)
        for value in (1.0, 2.0):
            space.fill_(value)
            yield f"layer.{value:.0f}", space

    written = write_snapshot(tmp_path, PolicyVersion(0), 0, gathered(), torch.float32)
    snapshot = read_snapshot(written.location, written.digest)
    assert {name: tensor.tolist() for name, tensor in snapshot.items()} == {
        "layer.1": [1.0, 1.0],
        "layer.2": [2.0, 2.0],
    }


def test_only_its_owner_reads_a_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "too"
    written = write(folder)
    for path in (tmp_path / "made", folder, written.location):
        assert path.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in written.location.iterdir())


def _missing(location: Path) -> None:
    shutil.rmtree(location)


def _without_bucket(location: Path) -> None:
    (location / "bucket-00000.safetensors").unlink()


def _torn(location: Path) -> None:
    bucket = location / "bucket-00000.safetensors"
    bucket.write_bytes(bucket.read_bytes()[:-1])


def _flipped(location: Path) -> None:
    bucket = location / "bucket-00000.safetensors"
    data = bytearray(bucket.read_bytes())
    data[-1] ^= 1
    bucket.write_bytes(data)


def _other_manifest(location: Path) -> None:
    manifest = location / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 12', b'"step": 13'))


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (_missing, "could not read the snapshot at .*: No such file"),
        (_without_bucket, "could not read a bucket of weights at .*: No such file"),
        (_torn, "expected [0-9]+ bytes in .*it is torn"),
        (_flipped, "expected the checksum .*it is corrupt"),
        (_other_manifest, "expected the manifest .*found"),
    ],
)
def test_a_harmed_snapshot_is_refused(tmp_path: Path, harm: object, sentence: str) -> None:
    written = write(tmp_path)
    harm(written.location)  # type: ignore[operator]
    with pytest.raises(WeightsError, match=sentence):
        read_snapshot(written.location, written.digest)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ((b'"format": 1', b'"format": 2'), "expected a manifest of format 1 .* found 2"),
        ((b'"offset": ', b'"offset": 9999'), "expected .* to be within its bucket"),
        ((b'"float32"', b'"float8"'), "expected a known number type"),
        ((b'"file": "', b'"file": "../'), "expected bucket files beside the manifest"),
        ((b'"tensors"', b'"tensor"'), "expected a manifest .* found other content"),
        ((b"{", b"["), "expected a manifest .* found other content"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, change: tuple[bytes, bytes], sentence: str) -> None:
    written = write(tmp_path)
    manifest = written.location / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(*change))
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    with pytest.raises(WeightsError, match=sentence):
        read_snapshot(written.location, digest)


def test_a_snapshot_of_the_same_number_is_replaced_and_its_old_digest_refused(tmp_path: Path) -> None:
    dead = write(tmp_path, scale=1.0)
    alive = write(tmp_path, scale=2.0)
    assert names(tmp_path) == ["v000012"]
    assert read_snapshot(alive.location, alive.digest)["model.norm.weight"].tolist() == [2.0, 3.0, 0.0]
    with pytest.raises(WeightsError, match="another trainer's snapshot of the same number"):
        read_snapshot(dead.location, dead.digest)


def test_a_snapshot_that_cannot_be_finished_leaves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    before = write(tmp_path)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "one", torch.zeros(3)
        raise RuntimeError("the rank died")

    with pytest.raises(RuntimeError, match="the rank died"):
        write_snapshot(tmp_path, PolicyVersion(12), 12, broken(), torch.float32)
    assert names(tmp_path) == ["v000012"]
    assert len(read_snapshot(before.location, before.digest)) == 4


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="found 'w' twice"):
        write_snapshot(tmp_path, PolicyVersion(0), 0, [("w", torch.zeros(1)), ("w", torch.ones(1))], torch.float32)
    assert names(tmp_path) == []


def test_storage_that_refuses_is_told_with_the_setting_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightsError, match=r"change weights\.folder"):
        write(tmp_path / "file" / "weights")


def test_the_newest_are_kept_and_what_dead_trainers_left_goes(tmp_path: Path) -> None:
    for version in (8, 9, 10, 11):
        write(tmp_path, version)
    (tmp_path / ".v000010.999.tmp").mkdir()  # of an existing version: abandoned
    (tmp_path / ".v000012.999.tmp").mkdir()  # perhaps being written
    (tmp_path / "notes").mkdir()
    keep_newest(tmp_path, 2)
    assert names(tmp_path) == [".v000012.999.tmp", "notes", "v000010", "v000011"]


def test_keeping_the_newest_of_nothing_is_nothing(tmp_path: Path) -> None:
    keep_newest(tmp_path / "absent", 2)
    assert names(tmp_path) == []
