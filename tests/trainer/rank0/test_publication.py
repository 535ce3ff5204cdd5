"""Publishing: which snapshot is filled and served, and version numbers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.trainer.checkpoint.commits import note_version, noted_version
from penstock.services.trainer.model.named_tensors import unique
from penstock.services.trainer.rank0.driver import outlives_the_process
from penstock.services.trainer.rank0.publication import Publication
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.settings import Settings
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.snapshot import read_snapshot
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.transport.place import DeviceLocation, boot_id
from tests.conftest import PATIENCE_S
from tests.support import tiny, weights


class Engine:
    """Each step adds 1 to every weight."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = tiny.model()

    def step(self) -> None:
        with torch.no_grad():
            torch._foreach_add_(list(self.model.parameters()), 1.0)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return list(unique(self.model))

    def shapes(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        return ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in unique(self.model))


def settings(folder: Path, transport: str = "pull", dtype: str = "float32", mode: str = "separate") -> Settings:
    return Settings.model_validate(
        {
            "run": {"id": "test", "folder": folder},
            "policy": {"dtype": dtype},
            "placement": {"mode": mode},
            "weights": {"transport": transport, "folder": folder / "weights", "deadline_s": 20.0},
        }
    )


@pytest.fixture
def engine() -> Any:
    return Engine()


@pytest.fixture
def publication(tmp_path: Path) -> Iterator[Publication]:
    opened = Publication(settings(tmp_path), "127.0.0.1", weights.secret)
    yield opened
    opened.close()


def publish(publication: Publication, engine: Any, version: int) -> PolicyRecord:
    published = publication.publish(engine, PolicyVersion(version), version)
    return weights.record(version, published.digest, published.location, published.source)


async def pull(record: PolicyRecord) -> dict[str, torch.Tensor]:
    puller, receiver = Puller(DeviceLocation("cpu", (), boot_id()), 1, 5.0, weights.secret), Receiver(1, 1, weights.CPU)
    try:
        offer = await puller.ask(record.source, record)
        shadow = FlatSnapshot(offer.layout, weights.CPU)
        await asyncio.to_thread(receiver.receive, offer, shadow)
        await puller.finish(offer, None)
        return shadow.tensors()
    finally:
        await puller.close()
        receiver.close()


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


async def test_what_is_pulled_is_what_was_trained_at_that_step(publication: Publication, engine: Any) -> None:
    for version in range(4):
        record = publish(publication, engine, version)
        assert record.location == ""
        expected = {name: tensor.clone() for name, tensor in engine.tensors()}
        engine.step()  # training continues; the snapshot is separate
        assert same(await pull(record), expected)


async def test_two_snapshots_take_turns_and_the_one_before_stays_whole_for_a_step(
    publication: Publication, engine: Any
) -> None:
    served: list[FlatSnapshot | None] = []
    copies = []
    for version in range(4):
        publish(publication, engine, version)
        served.append(publication._offered)
        copies.append({name: tensor.clone() for name, tensor in engine.tensors()})
        engine.step()
        if version:
            before = served[version - 1]
            assert before is not None
            assert before.header is not None
            assert before.header.version == version - 1
            assert same(before.tensors(), copies[version - 1])
    assert served[0] is served[2] is not served[1]
    assert served[1] is served[3]


async def test_only_the_newest_version_is_there(publication: Publication, engine: Any) -> None:
    older, newer = publish(publication, engine, 0), publish(publication, engine, 1)
    with pytest.raises(WeightsError, match="expected version 0 at this source, found version 1"):
        await pull(older)
    await pull(newer)


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Publication]:
    """Replicas use the trainer's devices in turn."""
    opened = Publication(settings(tmp_path, mode="shared"), "127.0.0.1", weights.secret)
    yield opened
    opened.close()


async def test_a_snapshot_that_is_away_in_training_returns_with_the_next_version_or_the_same(
    sharing: Publication, engine: Any
) -> None:
    assert not sharing.free(2), "nothing is published yet"
    first = publish(sharing, engine, 0)
    assert sharing.free(2)
    assert sharing.buckets == []
    with pytest.raises(WeightsError, match="expected version 0 at this source, found nothing"):
        await pull(first)
    assert sharing.newest == (0, 0)
    sharing.publish(engine, *sharing.newest)  # the batch was skipped
    assert same(await pull(first), dict(engine.tensors()))
    assert sharing.free(4)
    engine.step()
    assert same(await pull(publish(sharing, engine, 1)), dict(engine.tensors()))


@pytest.mark.parametrize(
    ("changes", "rung"),
    [({"mode": "shared"}, 1), ({"mode": "shared", "transport": "file"}, 4), ({}, 4)],
)
def test_a_snapshot_stays_where_replicas_may_pull_or_keep_their_weights(
    changes: dict[str, str], rung: int, tmp_path: Path, engine: Any
) -> None:
    publication = Publication(settings(tmp_path, **changes), "127.0.0.1", weights.secret)
    publish(publication, engine, 0)
    before = [bucket.data_ptr() for bucket in publication.buckets]
    assert not publication.free(rung)
    assert [bucket.data_ptr() for bucket in publication.buckets] == before
    publication.close()


async def test_another_commit_of_the_same_number_is_never_taken_for_ours(publication: Publication, engine: Any) -> None:
    refused = publish(publication, engine, 7)  # another trainer committed version 7: ours was fenced
    committed = weights.record(7, "ab" * 32, source=refused.source)
    with pytest.raises(WeightsError, match="other weights of that number"):
        await pull(committed)


async def test_a_source_that_is_closed_answers_nobody(publication: Publication, engine: Any) -> None:
    record = publish(publication, engine, 0)
    publication.close()
    with pytest.raises(WeightsError, match="could not reach the source of weights at"):
        await pull(record)


def test_bfloat16_is_published_where_the_policy_says_so(tmp_path: Path, engine: Any) -> None:
    publication = Publication(settings(tmp_path, dtype="bfloat16"), "127.0.0.1", weights.secret)
    publish(publication, engine, 0)
    assert publication._offered is not None
    tensors = publication._offered.tensors()
    publication.close()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert same(tensors, {name: tensor.to(torch.bfloat16) for name, tensor in engine.tensors()})


@pytest.mark.parametrize("transport", ["pull", "file"])
async def test_buffers_keep_the_type_in_which_they_are_used(tmp_path: Path, engine: Any, transport: str) -> None:
    bias = torch.tensor([7.0, 7.01, 7.02, 7.03])
    engine.model.register_buffer("router_bias", bias)
    publication = Publication(settings(tmp_path, transport, dtype="bfloat16"), "127.0.0.1", weights.secret)
    try:
        record = publish(publication, engine, 0)
        if transport == "pull":
            tensors = await pull(record)
        else:
            tensors = read_snapshot(Path(record.location), record.manifest_digest)
    finally:
        publication.close()
    kept = {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16}
    assert [name.rpartition(".")[2] for name in kept] == ["router_bias"]
    assert all(torch.equal(tensor, bias) for tensor in kept.values())


def test_by_file_a_record_says_where_and_no_process_serves(tmp_path: Path, engine: Any) -> None:
    publication = Publication(settings(tmp_path, "file"), "127.0.0.1", weights.secret)
    record = publish(publication, engine, 0)
    assert record.source == ""
    assert outlives_the_process(settings(tmp_path, "file"))
    assert same(read_snapshot(Path(record.location), record.manifest_digest), dict(engine.tensors()))
    again = publish(publication, engine, 1)
    assert (Path(again.location) / "changes.safetensors").is_file()
    publication.close()


def test_the_largest_number_is_noted_and_never_falls(tmp_path: Path) -> None:
    assert noted_version(tmp_path / "run") == 0
    for version in (3, 4, 2):
        note_version(tmp_path / "run", PolicyVersion(version))
    assert noted_version(tmp_path / "run") == 4
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["newest_version"]


async def test_a_rank_that_does_not_know_the_runs_secret_refuses_every_puller(tmp_path: Path, engine: Any) -> None:
    publication = Publication(settings(tmp_path), "127.0.0.1")
    record = publish(publication, engine, 1)
    for secret in (weights.secret, bytes):
        puller = Puller(DeviceLocation("cpu", (), boot_id()), 1, PATIENCE_S, secret)
        with pytest.raises(WeightsError, match="could not reach"):
            await puller.ask(record.source, record)
        await puller.close()
    publication.close()
