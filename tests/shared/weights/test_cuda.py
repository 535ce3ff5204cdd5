"""Laws of a pull between GPUs: NCCL, or IPC within one (skipped without)."""

import signal
import time
from collections.abc import Iterator

import pytest
import torch

from shared.errors import WeightsError
from shared.weights.format.checksum import checksum, text
from tests.support.weights_players import Replica, Start, Trainer, fingerprint, players, policy

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
