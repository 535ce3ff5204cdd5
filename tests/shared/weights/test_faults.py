"""Failing pulls: others continue, and no weights are half written."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator

import msgpack
import pytest
from torch._C._distributed_c10d import HashStore

from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import plan_layout
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.source import session
from penstock.shared.weights.transport import group
from penstock.shared.weights.transport.group import open_group
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import DeviceLocation
from tests.conftest import PATIENCE_S, until
from tests.support import weights
from tests.support.weights_players import CPU, Player, Replica, Start, Trainer, fingerprint, players, policy

SLACK_S = PATIENCE_S
DEADLINE_S = 3 * SLACK_S
SHORT_S = 2.0


@pytest.fixture
def start() -> Iterator[Start]:
    yield from players(DEADLINE_S)


def half_pulled(trainer: Player, replica: Player) -> int:
    """Begin a pull of which two buckets arrive; begin it again if the machine was too busy for a short deadline."""
    source, record = trainer.call("address"), trainer.call("arrive", 1, 11, 2)
    call, ends_at_s = replica.later("pull", source, record), time.monotonic() + PATIENCE_S
    while replica.call("arrived") != 2:
        assert time.monotonic() < ends_at_s
        if replica.answered(call):
            call = replica.later("pull", source, record)
        time.sleep(0.01)
    return call


async def offered(puller: Puller, trainer: Player) -> Offer:
    """Ask for version 1, again if the machine was too busy for the trainer's short deadline."""
    source, record = trainer.call("address"), trainer.call("publish", 1, 11)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(WeightsError):
                return await puller.ask(source, record)


def refused(replica: Player, call: int, sentence: str, within_s: float) -> None:
    before_s = time.monotonic()
    with pytest.raises(WeightsError, match=sentence):
        replica.result(call)
    assert time.monotonic() - before_s < within_s
    assert replica.call("holds") is None


def test_a_source_that_dies_in_a_pull_ends_it_and_another_source_serves(start: Start) -> None:
    trainer, other, replica = start(Trainer), start(Trainer), start(Replica)
    call = half_pulled(trainer, replica)
    trainer.signal(signal.SIGKILL)
    refused(replica, call, "could not receive a bucket|NCCL lost the peer|the source ended the pull", within_s=SLACK_S)
    record = other.call("publish", 1, 11)
    assert replica.call("pull", other.call("address"), record) == fingerprint(policy(11))


def test_a_puller_that_dies_in_a_pull_harms_neither_the_source_nor_the_next_puller(start: Start) -> None:
    trainer, dying, other = start(Trainer), start(Replica), start(Replica)
    half_pulled(trainer, dying)
    dying.signal(signal.SIGKILL)
    trainer.until("counts", lambda counts: counts == (0, 1), timeout_s=SLACK_S)
    trainer.call("mark", 2)
    before_s = time.monotonic()
    record = trainer.call("record")
    assert other.call("pull", trainer.call("address"), record) == fingerprint(policy(11))
    assert time.monotonic() - before_s < SLACK_S


def test_a_source_that_stops_holds_nobody_past_the_deadline_and_what_it_sends_later_goes_nowhere(start: Start) -> None:
    trainer, other, replica = start(Trainer, SHORT_S), start(Trainer), start(Replica, 2 * SHORT_S)
    call = half_pulled(trainer, replica)
    source, record = trainer.call("address"), trainer.call("record")
    trainer.signal(signal.SIGSTOP)
    refused(
        replica,
        call,
        f"timeout of {SHORT_S:g} s while waiting for a bucket|could not receive a bucket|NCCL lost the peer|the source ended the pull",
        within_s=SHORT_S + SLACK_S,
    )
    again = replica.later("pull", source, record)
    refused(replica, again, "did not answer", within_s=2 * SHORT_S + SLACK_S)
    replica.call("wait_for_answers", DEADLINE_S)
    actual = replica.call("pull", other.call("address"), other.call("publish", 2, 12))
    trainer.signal(signal.SIGCONT)
    trainer.call("mark", 2)
    assert replica.call("fingerprint") == actual == fingerprint(policy(12))


def test_a_stopped_puller_is_given_up_at_the_deadline(start: Start) -> None:
    trainer, stopped = start(Trainer, SHORT_S), start(Replica)
    half_pulled(trainer, stopped)
    begun = stopped.call("begun")
    stopped.signal(signal.SIGSTOP)
    trainer.call("mark", 2)
    trainer.until("counts", lambda counts: counts == (0, begun), timeout_s=SHORT_S + SLACK_S)


async def test_a_rank_that_never_comes_is_given_up_at_the_deadline_by_both_sides(start: Start) -> None:
    trainer, first = start(Trainer, SHORT_S), start(Replica, rank=1, ranks=2)
    puller = Puller(DeviceLocation(), 2, DEADLINE_S, weights.secret)
    offer = await offered(puller, trainer)
    call = first.later("receive", offer.pack())
    await asyncio.to_thread(refused, first, call, "waiting for a gloo group of 3 ranks", SHORT_S + SLACK_S)
    trainer.until("counts", lambda counts: counts == (0, 1), timeout_s=SHORT_S + SLACK_S)
    await puller.finish(offer, "a rank did not come")
    await puller.close()


def test_a_damaged_bucket_is_refused_by_name_and_the_next_version_is_pulled(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    record = trainer.call("publish", 1, 11)
    trainer.call("corrupt", 2)
    call = replica.later("pull", trainer.call("address"), record)
    refused(replica, call, r"bucket 2 \(layers\.0\.w … layers\.0\.w\) of version 1", within_s=SLACK_S)
    record = trainer.call("publish", 2, 12)
    assert replica.call("pull", trainer.call("address"), record) == fingerprint(policy(12))


def test_a_new_version_in_the_middle_of_a_pull_fails_it_as_torn(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    call = half_pulled(trainer, replica)
    record = trainer.call("publish", 2, 12)
    refused(replica, call, "could not receive a bucket|NCCL lost the peer|the source ended the pull", within_s=SLACK_S)
    assert "replaced it: the pull is torn" in replica.call("reasons")[0]
    assert replica.call("pull", trainer.call("address"), record) == fingerprint(policy(12))


def test_what_a_relay_loses_its_puller_loses_too(start: Start) -> None:
    trainer, first, second = start(Trainer), start(Replica), start(Replica)
    upper = half_pulled(trainer, first)
    lower = second.later("pull", first.call("address"), trainer.call("record"))
    second.until("arrived", lambda buckets: buckets == 2)
    trainer.signal(signal.SIGKILL)
    refused(first, upper, "could not receive a bucket|NCCL lost the peer|the source ended the pull", within_s=SLACK_S)
    refused(second, lower, "could not receive a bucket|NCCL lost the peer|the source ended the pull", within_s=SLACK_S)


def test_a_version_that_is_gone_or_not_there_yet_is_said_so_and_the_session_stays(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    source = trainer.call("address")
    first = trainer.call("publish", 1, 11)
    replica.call("pull", source, first)
    second = trainer.call("publish", 2, 12)
    with pytest.raises(WeightsError, match="expected version 1 at this source, found version 2: it is gone"):
        replica.call("pull", source, first)
    trainer.call("void")
    with pytest.raises(WeightsError, match="expected version 2 at this source, found nothing: it is not there yet"):
        replica.call("pull", source, second)
    sessions = replica.call("sessions")
    assert replica.call("pull", source, trainer.call("publish", 3, 13)) == fingerprint(policy(13))
    assert replica.call("sessions") == sessions


def test_other_weights_of_the_same_number_are_refused_before_a_byte_moves(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    trainer.call("publish", 1, 11)
    ours = Trainer(DEADLINE_S)
    with pytest.raises(WeightsError, match="other weights of that number"):
        replica.call("pull", trainer.call("address"), ours.publish(1, 12))
    ours.close()
    assert replica.call("arrived") == 0


def test_withdrawing_waits_for_pulls_in_progress(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    call = half_pulled(trainer, replica)
    withdrawal = trainer.later("withdraw", 2 * SLACK_S)
    trainer.call("mark", 2)
    assert replica.result(call) == fingerprint(policy(11))
    assert trainer.result(withdrawal) < SLACK_S
    with pytest.raises(WeightsError, match="found nothing"):
        replica.call("pull", trainer.call("address"), trainer.call("record"))


def test_withdrawing_waits_no_longer_than_it_was_told_and_then_the_pull_fails(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    call = half_pulled(trainer, replica)
    assert 0.2 <= trainer.call("withdraw", 0.2) < 0.2 + SLACK_S
    refused(replica, call, "could not receive a bucket|NCCL lost the peer|the source ended the pull", within_s=SLACK_S)


def test_a_receive_that_is_aborted_ends_at_once(start: Start) -> None:
    trainer, replica = start(Trainer), start(Replica)
    call = half_pulled(trainer, replica)
    replica.call("abort")
    refused(replica, call, "was aborted", within_s=SLACK_S)
    trainer.until("counts", lambda counts: counts == (0, 1), timeout_s=SLACK_S)


async def test_a_pull_without_a_group_to_join_ends_at_the_deadline(start: Start) -> None:
    trainer = start(Trainer, SHORT_S)
    puller, receiver = Puller(DeviceLocation(), 1, DEADLINE_S, weights.secret), Receiver(1, 1, CPU)
    offer = await offered(puller, trainer)
    trainer.signal(signal.SIGSTOP)  # torch alone would wait forever
    before_s = time.monotonic()
    with pytest.raises(WeightsError, match="waiting for a gloo group of 2 ranks"):
        await asyncio.to_thread(receiver.receive, offer, FlatSnapshot(offer.layout, CPU))
    assert time.monotonic() - before_s < SHORT_S + SLACK_S
    await puller.close()


def connected(address: str, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout_s)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x01\x01",
        b"\x00\x00\x00\x08" + msgpack.packb({"verb": 1})[:4],
        b"\x00\x00\x00\x07" + msgpack.packb({"verb": 1}),
    ],
    ids=["another protocol", "oversized", "no map", "a number", "half a frame", "an unknown verb"],
)
def test_a_peer_that_talks_nonsense_is_shut_out_and_others_are_served(said: bytes) -> None:
    trainer, replica = Trainer(DEADLINE_S), Replica(DEADLINE_S)
    record = trainer.publish(1, 11)
    trainer.source._deadline_s = 0.5
    with connected(trainer.address(), SLACK_S) as peer:
        peer.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):  # perhaps a sentence, then the end
                pass
    trainer.source._deadline_s = DEADLINE_S
    assert replica.pull(trainer.address(), record) == fingerprint(policy(11))
    trainer.close()
    replica.close()


def test_a_peer_that_says_nothing_is_shut_out_at_the_deadline() -> None:
    trainer = Trainer(0.5)
    with connected(trainer.address(), 0.5 + SLACK_S) as peer:
        while peer.recv(4096):  # a challenge, then the end
            pass
    trainer.close()


@pytest.mark.parametrize(
    "answer", [b"", b"\x00", b"\x00\x00\x10\x00abc"], ids=["silence", "half a length", "half a frame"]
)
async def test_a_source_that_does_not_finish_its_answer_is_left_at_the_deadline(answer: bytes) -> None:
    left = asyncio.Event()

    async def stalled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read(-1)
        writer.close()
        left.set()

    ours = Trainer(0.5)
    record = ours.publish(1, 11)
    ours.close()
    async with await asyncio.start_server(stalled, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        puller = Puller(DeviceLocation(), 1, 0.3, weights.secret)
        before_s = time.monotonic()
        with pytest.raises(WeightsError, match="did not answer"):
            await puller.ask(f"{host}:{port}", record)
        assert time.monotonic() - before_s < 0.3 + SLACK_S
        await puller.close()
        await left.wait()


async def test_a_source_that_is_not_there_is_said_so() -> None:
    ours = Trainer(0.5)
    record = ours.publish(1, 11)
    ours.close()
    puller = Puller(DeviceLocation(), 1, DEADLINE_S, weights.secret)
    with pytest.raises(WeightsError, match="could not reach the source of weights at"):
        await puller.ask(ours.address(), record)
    for address in ("nowhere", "127.0.0.1:99999"):
        with pytest.raises(WeightsError, match="expected host:port"):
            await puller.ask(address, record)


async def test_the_opening_of_a_group_whose_others_do_not_come_ends_with_its_interrupt_and_leaves_no_thread() -> None:
    asked: list[int] = []

    def interrupt() -> None:
        asked.append(0)
        if len(asked) > 3:
            raise WeightsError("the pull has ended")

    with pytest.raises(WeightsError, match="the pull has ended"):
        open_group("gloo", HashStore, 0, 3, 3 * PATIENCE_S, CPU, "127.0.0.1", interrupt)
    await until(lambda: not any(thread.name.startswith("bounded: a gloo") for thread in threading.enumerate()))


async def test_a_group_opens_with_a_process_of_an_earlier_version_that_announces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "_ANNOUNCED_S", 0.2)
    store = HashStore()
    opened = await asyncio.gather(
        asyncio.to_thread(group._GlooGroup, store, 1, 2, PATIENCE_S, "127.0.0.1"),
        asyncio.to_thread(open_group, "gloo", lambda: store, 0, 2, PATIENCE_S, CPU, "127.0.0.1"),
    )
    assert sorted(each.rank for each in opened) == [0, 1]
    for each in opened:
        each.abort()
    await until(lambda: not any(thread.name == "end gloo" for thread in threading.enumerate()))


def test_replicas_of_version_0_2_0_receive_whole_buckets() -> None:
    snapshot = FlatSnapshot(plan_layout([("weight", "float32", (4,))]), CPU)
    assert session._pieces([b"here", b"here"], snapshot) == []
