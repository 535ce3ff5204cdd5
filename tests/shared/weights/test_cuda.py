"""Laws of a pull between GPUs: NCCL, or IPC within one (skipped without)."""

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.checksum import checksum, text
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.transport.place import DeviceLocation
from tests.support import weights
from tests.support.weights_players import Replica, Start, Trainer, fingerprint, place, players, policy

DEADLINE_S = 5.0
OPEN_S = 30.0
"""A process's first CUDA context and communicator are slow."""
SLACK_S = 5.0
one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def start() -> Iterator[Start]:
    yield from players(OPEN_S)


@one_gpu
@pytest.mark.parametrize("size", [256, 8192, 8192 * 5 + 256 * 7, 8192 * 4096])
def test_a_checksum_is_the_same_on_both_devices(size: int) -> None:
    bucket = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert text(checksum(bucket.cuda())) == text(checksum(bucket))


@pytest.mark.parametrize(
    ("trainers", "replicas"),
    [
        pytest.param("cuda:0", "cuda:1", marks=two_gpus, id="nccl"),
        pytest.param("cuda:0", "cuda:0", marks=one_gpu, id="ipc"),
        pytest.param("cuda:0", "cpu", marks=one_gpu, id="gloo"),
    ],
)
def test_pull_after_pull_is_what_was_published(start: Start, trainers: str, replicas: str) -> None:
    trainer, replica = start(Trainer, device=trainers), start(Replica, device=replicas)
    for version in (1, 2, 3):
        record = trainer.call("publish", version, version, 50)
        assert replica.call("pull", trainer.call("address"), record) == fingerprint(policy(version, 50))
    assert len(replica.call("sessions")) == 1


@two_gpus
def test_shares_of_two_gpus_are_pulled_as_one_version_over_nccl_and_ipc(start: Start) -> None:
    assert_shares_are_pulled(start, "cuda:0", "cuda:1")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
async def test_two_ranks_of_a_replica_pull_shares_of_two_gpus_over_nccl(start: Start) -> None:
    sources = [start(Trainer, device=f"cuda:{rank}", share=(rank, 2)) for rank in (0, 1)]
    ranks = [start(Replica, rank=rank, ranks=2, device=f"cuda:{1 + rank}") for rank in (1, 2)]
    sources[0].call("name_others", [sources[1].call("address")])
    places = [place(torch.device(f"cuda:{number}")) for number in (2, 3)]
    both = DeviceLocation("cuda", tuple(uuid for each in places for uuid in each.gpu_uuids), places[0].boot_id)
    puller = Puller(both, 2, OPEN_S, weights.secret)
    for version in (1, 2, 3):
        record, _ = (source.call("publish", version, version, 50) for source in sources)
        offer = await puller.ask(sources[0].call("address"), record)
        calls = [rank.later("receive", offer.pack()) for rank in ranks]
        results = [await asyncio.to_thread(rank.result, call) for rank, call in zip(ranks, calls, strict=True)]
        await puller.finish(offer, None)
        assert results == [fingerprint(policy(version, 50))] * 2
    await puller.close()


def assert_shares_are_pulled(start: Start, first_device: str, second_device: str) -> None:
    first, second = (
        start(Trainer, device=first_device, share=(0, 2)),
        start(Trainer, device=second_device, share=(1, 2)),
    )
    replica = start(Replica, device=second_device)
    first.call("name_others", [second.call("address")])
    for version in (1, 2, 3):
        second.call("publish", version, version, 50)
        record = first.call("publish", version, version, 50)
        assert replica.call("pull", first.call("address"), record) == fingerprint(policy(version, 50))
    assert len(replica.call("sessions")) == 2


@two_gpus
def test_a_damaged_bucket_is_refused_over_nccl(start: Start) -> None:
    trainer, replica = start(Trainer, device="cuda:0"), start(Replica, device="cuda:1")
    record = trainer.call("publish", 1, 11)
    trainer.call("corrupt", 2)
    with pytest.raises(WeightsError, match="for bucket 2"):
        replica.call("pull", trainer.call("address"), record)


@two_gpus
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_dies_or_stops_under_nccl_holds_nobody_past_the_deadline(
    start: Start, blow: signal.Signals
) -> None:
    trainer = start(Trainer, DEADLINE_S, device="cuda:0")
    other, replica = start(Trainer, device="cuda:0"), start(Replica, device="cuda:1")
    record = trainer.call("arrive", 1, 11, 2)
    call = replica.later("pull", trainer.call("address"), record)
    replica.until("arrived", lambda buckets: buckets == 2)
    trainer.signal(blow)
    before_s = time.monotonic()
    with pytest.raises(WeightsError, match="expected"):
        replica.result(call, 3 * DEADLINE_S)
    assert time.monotonic() - before_s < DEADLINE_S + SLACK_S
    record = other.call("publish", 2, 12)
    assert replica.call("pull", other.call("address"), record) == fingerprint(policy(12))


@two_gpus
def test_a_puller_that_dies_under_nccl_frees_the_source_for_the_next(start: Start) -> None:
    trainer = start(Trainer, device="cuda:0")
    dying, other = start(Replica, device="cuda:1"), start(Replica, device="cuda:1")
    record = trainer.call("arrive", 1, 11, 2)
    dying.later("pull", trainer.call("address"), record)
    dying.until("arrived", lambda buckets: buckets == 2)
    dying.signal(signal.SIGKILL)
    trainer.until("counts", lambda counts: counts == (0, 1))
    trainer.call("mark", 2)
    assert other.call("pull", trainer.call("address"), record) == fingerprint(policy(11))


@two_gpus
def test_what_a_source_gives_up_its_puller_gives_up_at_once(start: Start) -> None:
    trainer, replica = start(Trainer, device="cuda:0"), start(Replica, device="cuda:1")
    record = trainer.call("arrive", 1, 11, 2)
    call = replica.later("pull", trainer.call("address"), record)
    replica.until("arrived", lambda buckets: buckets == 2)
    trainer.call("void")
    with pytest.raises(WeightsError, match=r"the source ended the pull|lost the peer"):
        replica.result(call, SLACK_S)
