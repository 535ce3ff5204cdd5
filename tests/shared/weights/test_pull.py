"""Laws of a pull between processes, over gloo."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import Puller, file_offer
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.transport.place import DeviceLocation
from tests.conftest import PATIENCE_S
from tests.shared.weights.test_cuda import assert_shares_are_pulled
from tests.support import weights
from tests.support.weights_players import CPU, Replica, Start, Trainer, fingerprint, layout_of, players, policy

DEADLINE_S = PATIENCE_S


@pytest.fixture
def start() -> Iterator[Start]:
    yield from players(DEADLINE_S)


def test_what_is_pulled_is_what_was_published_and_the_next_pull_uses_the_same_group(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    source = trainer.call("address")
    first = trainer.call("publish", 1, 11)
    assert trainer.call("buckets") == 6
    assert replica.call("pull", source, first) == fingerprint(policy(11))
    session = replica.call("sessions")
    second = trainer.call("publish", 2, 12)
    assert replica.call("pull", source, second) == fingerprint(policy(12))
    assert replica.call("sessions") == session
    trainer.until("counts", lambda counts: counts == (2, 0))


def test_a_session_goes_on_when_the_layout_changes_between_two_pulls(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    source = trainer.call("address")
    replica.call("pull", source, trainer.call("publish", 1, 11))
    session = replica.call("sessions")
    larger = trainer.call("publish", 2, 12, 2)
    assert replica.call("pull", source, larger) == fingerprint(policy(12, 2))
    assert replica.call("pull", source, trainer.call("publish", 3, 13)) == fingerprint(policy(13))
    assert replica.call("sessions") == session


def test_a_replica_that_still_receives_serves_on_what_it_has(start: Start) -> None:
    trainer, first, second = start(Trainer), start(Replica), start(Replica)
    record = trainer.call("arrive", 1, 11, 2)
    upper = first.later("pull", trainer.call("address"), record)
    lower = second.later("pull", first.call("address"), record)  # perhaps before the first one begins
    second.until("arrived", lambda buckets: buckets == 2)
    assert first.call("arrived") == 2
    trainer.call("mark", 2)
    assert first.result(upper) == second.result(lower) == fingerprint(policy(11))
    for source in (trainer, first):
        source.until("counts", lambda counts: counts == (1, 0))


def test_a_replica_pulls_shares_of_two_processes_as_one_version(start: Start) -> None:
    assert_shares_are_pulled(start, "cpu", "cpu")


async def test_every_rank_of_a_replica_receives_from_one_session(start: Start) -> None:
    trainer, first, two = start(Trainer), start(Replica, rank=1, ranks=2), start(Replica, rank=2, ranks=2)
    puller = Puller(DeviceLocation(), 2, DEADLINE_S, weights.secret)
    for version in (1, 2):
        offer = await puller.ask(trainer.call("address"), trainer.call("publish", version, version))
        calls = [rank.later("receive", offer.pack()) for rank in (first, two)]
        results = [await asyncio.to_thread(rank.result, call) for rank, call in zip((first, two), calls, strict=True)]
        await puller.finish(offer, None)
        assert results == [fingerprint(policy(version))] * 2
    assert first.call("sessions") == two.call("sessions") == [offer.session]
    await puller.close()


async def test_bucket_after_bucket_comes_through_one_buffer(start: Start) -> None:
    trainer = start(Trainer)
    record = trainer.call("publish", 1, 11)
    puller, receiver = Puller(DeviceLocation(), 1, DEADLINE_S, weights.secret), Receiver(1, 1, CPU)
    offer = await puller.ask(trainer.call("address"), record)
    shadow = FlatSnapshot(offer.layout, CPU)
    buffer = torch.empty(max(offer.layout.bucket_bytes), dtype=torch.uint8)

    def gather() -> list[int]:
        numbers = []
        for number, bucket in receiver.receive_each(offer, buffer):
            assert bucket.data_ptr() == buffer.data_ptr()
            shadow.buckets[number].copy_(bucket)
            numbers.append(number)
        return numbers

    assert await asyncio.to_thread(gather) == [0, 1, 2, 3, 4, 5]
    await puller.finish(offer, None)
    assert fingerprint(shadow.tensors().items()) == fingerprint(policy(11))
    receiver.close()
    await puller.close()


async def test_shares_of_two_versions_are_refused_and_those_of_one_are_a_version() -> None:
    tensors = policy(11)
    layout = layout_of(tensors)
    whole = FlatSnapshot(layout, CPU).fill(tensors, PolicyVersion(1), 1)
    shares = [FlatSnapshot(layout, CPU, (rank, 2)) for rank in (0, 1)]
    puller, receiver, shadow = (
        Puller(DeviceLocation(), 1, DEADLINE_S, weights.secret),
        Receiver(1, 1, CPU),
        FlatSnapshot(layout, CPU),
    )
    record = weights.record(1, whole.digest)
    with weights.serving(deadline_s=20.0) as first, weights.serving(deadline_s=20.0) as second:
        for version in (2, 1):
            shares[0].fill(tensors, PolicyVersion(1), 1, lambda _: whole.checksums)
            shares[1].fill(tensors, PolicyVersion(version), 1, lambda _: whole.checksums)
            first.offer(shares[0], [second.address])
            second.offer(shares[1])
            if version == 2:
                with pytest.raises(WeightsError, match="version 2: it is gone"):
                    await puller.ask(first.address, record)
        assert [[bucket.numel() > 0 for bucket in share.buckets] for share in shares] == [
            [True, False] * 3,
            [False, True] * 3,
        ]
        offer = await puller.ask(first.address, record)
        await asyncio.to_thread(receiver.receive, offer, shadow)
        await puller.finish(offer, None)
        assert fingerprint(shadow.tensors().items()) == fingerprint(tensors)
        receiver.close()
        await puller.close()


async def test_over_a_broken_fabric_a_source_writes_a_file_that_is_held_to_the_same_checksums(
    start: Start, tmp_path: Path
) -> None:
    trainer = start(Trainer, folder=str(tmp_path))
    record = trainer.call("publish", 1, 11)
    puller, receiver = Puller(DeviceLocation(), 1, DEADLINE_S, weights.secret), Receiver(1, 1, CPU)
    offers = [await puller.ask_for_file(trainer.call("address"), record) for _ in range(2)]
    assert offers[0] == offers[1]
    assert offers[0].source == str(tmp_path / "v000001")
    assert offers[0].header.digest == record.manifest_digest
    shadow = FlatSnapshot(offers[0].layout, CPU)
    await asyncio.to_thread(receiver.receive, offers[0], shadow)
    await puller.finish(offers[0], None)
    assert fingerprint(shadow.tensors().items()) == fingerprint(policy(11))
    assert shadow.whole
    await puller.close()


def test_a_snapshot_by_file_is_received_like_any_other(tmp_path: Path) -> None:
    tensors = policy(11)
    written = write_snapshot(tmp_path, PolicyVersion(3), 3, tensors, None)
    record = PolicyRecord(PolicyVersion(3), None, 3, 0.0, written.digest, str(written.location))
    offer = file_offer(record, DEADLINE_S)
    shadow = FlatSnapshot(offer.layout, CPU)
    Receiver(1, 1, CPU).receive(offer, shadow)
    assert fingerprint(shadow.tensors().items()) == fingerprint(tensors)
    filled = FlatSnapshot(offer.layout, CPU).fill(tensors, PolicyVersion(3), 3)
    assert shadow.header == filled
    pieces = dict(Receiver(1, 1, CPU).receive_each(offer, torch.empty(offer.layout.nbytes, dtype=torch.uint8)))
    assert list(pieces) == list(range(len(offer.layout.bucket_bytes)))


def test_groups_of_weights_leave_the_trainers_own_group_alone(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    trainer.call("open_own_group")
    record = trainer.call("publish", 1, 11)
    assert replica.call("pull", trainer.call("address"), record) == fingerprint(policy(11))
    assert trainer.call("sum_in_own_group", 3.0) == 3.0
    assert not replica.call("has_default_group")


def test_the_control_side_of_a_pull_needs_no_torch() -> None:
    code = "import penstock.shared.weights.receiver.puller, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


def test_an_abort_that_comes_before_its_receive_begins_ends_it(tmp_path: Path) -> None:
    written = write_snapshot(tmp_path, PolicyVersion(3), 3, policy(11), None)
    record = PolicyRecord(PolicyVersion(3), None, 3, 0.0, written.digest, str(written.location))
    offer, receiver = file_offer(record, DEADLINE_S), Receiver(1, 1, CPU)
    shadow = FlatSnapshot(offer.layout, CPU)
    receiver.begin()
    receiver.abort()  # its thread has not got to it yet
    with pytest.raises(WeightsError, match="was aborted"):
        receiver.receive(offer, shadow)
    receiver.begin()
    receiver.receive(offer, shadow)
    assert shadow.whole
