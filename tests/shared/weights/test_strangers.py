"""Only the run's processes may use a weight source, while they have requests."""

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyRecord
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.errors import PeerError, WeightsError
from penstock.shared.peers import frames
from penstock.shared.peers.handshake import Newcomers, admit, introduce
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.source import source as sources
from penstock.shared.weights.source.source import MAX_STRANGERS, WeightSource
from penstock.shared.weights.transport.place import DeviceLocation
from tests.conftest import PATIENCE_S, until
from tests.support import weights
from tests.support.raw_redis import raw

LONG_S = 60.0


@contextlib.contextmanager
def serving(
    folder: Path | None = None, *, idle_s: float = LONG_S, deadline_s: float = LONG_S
) -> Iterator[tuple[WeightSource, PolicyRecord]]:
    source = WeightSource("127.0.0.1", 0, weights.secret, deadline_s=deadline_s, idle_s=idle_s, file_folder=folder)
    try:
        yield source, weights.offered(source, weights.fill({"w": torch.ones(4)}, 1))
    finally:
        source.close()


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def at_end(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


async def pulled(record: PolicyRecord, secret: bytes = weights.SECRET) -> None:
    puller, receiver = Puller(DeviceLocation(), 1, PATIENCE_S, lambda: secret), Receiver(1, 1, weights.CPU)
    try:
        offer = await puller.ask(record.source, record)
        buffer = torch.empty(1 << 20, dtype=torch.uint8)
        await asyncio.to_thread(lambda: list(receiver.receive_each(offer, buffer)))
        await puller.finish(offer, None)
    finally:
        await puller.close()
        receiver.close()


async def test_who_does_not_know_the_secret_gets_no_weights_and_orders_no_file(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, record):
        puller = Puller(DeviceLocation(), 1, PATIENCE_S, lambda: b"the secret of another run")
        for ask in (puller.ask, puller.ask_for_file):
            with pytest.raises(WeightsError, match="did not accept this process: do both belong to the same run"):
                await ask(record.source, record)
        assert list(tmp_path.iterdir()) == []
        knows = Puller(DeviceLocation(), 1, PATIENCE_S, weights.secret)
        offer = await knows.ask_for_file(record.source, record)
        await knows.close()
        assert offer.transport == "file"
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("verb", ["ask", "file"])
def test_a_question_before_the_proof_is_not_answered(verb: str, tmp_path: Path) -> None:
    with serving(tmp_path) as (_, record), connected(record.source) as peer:
        frames.send(peer, {"verb": verb, "version": 1, "ranks": 1, "place": {}}, PATIENCE_S)
        assert set(frames.receive(peer, PATIENCE_S)) == {"challenge"}
        assert at_end(peer)
        assert list(tmp_path.iterdir()) == []


async def test_a_source_that_does_not_know_the_secret_is_not_believed() -> None:
    left = asyncio.Event()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.pack({"challenge": bytes(32)}))
        said = await frames.receive_async(reader)
        writer.write(frames.pack({"proof": said["proof"]}))  # back to its sender
        await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(pretend, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises(PeerError, match="the peer does not know the secret of this run"):
            await introduce(reader, writer, weights.SECRET)
        writer.close()
        await left.wait()


def test_a_proof_is_good_for_one_connection_and_no_secret_is_never_proved() -> None:
    for secret, proof in (
        (weights.SECRET, bytes(32)),
        (b"", bytes(32)),
        (weights.SECRET, "text"),
        (weights.SECRET, None),
    ):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            frames.send(theirs, {"challenge": bytes(32), "proof": proof}, PATIENCE_S)
            with pytest.raises(PeerError, match="the peer does not know the secret"):
                admit(ours, secret, PATIENCE_S)


async def test_silent_strangers_keep_no_replica_out() -> None:
    with serving() as (source, record), contextlib.ExitStack() as silent:
        peers = [silent.enter_context(connected(record.source)) for _ in range(4 * MAX_STRANGERS)]
        await pulled(record)
        assert all(at_end(peer) for peer in peers[:MAX_STRANGERS])
        await until(lambda: len(source._connections) <= MAX_STRANGERS)


async def test_a_puller_that_asked_once_and_stays_silent_is_dropped_and_may_come_back() -> None:
    with serving(idle_s=0.05) as (source, record):
        puller = Puller(DeviceLocation(), 1, PATIENCE_S, weights.secret)
        for _ in range(2):
            with pytest.raises(WeightsError, match="version 7"):
                await puller.ask(record.source, weights.record(7, "0" * 64))
            await until(lambda: not source._connections)
        await puller.close()


async def test_a_source_that_can_start_no_thread_serves_again_once_it_can_and_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refusals = threading.Thread.start, itertools.count()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "source session" and next(refusals) < 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving() as (source, record):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with connected(record.source) as peer:
                assert at_end(peer)
        await pulled(record)
        assert next(refusals) > 2
    assert not any(thread.is_alive() for thread in source._threads)


async def test_pullers_beyond_the_most_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_SESSIONS", 1)
    with serving() as (_, record):
        first, second = (Puller(DeviceLocation(), 1, PATIENCE_S, weights.secret) for _ in range(2))
        with pytest.raises(WeightsError, match="version 7"):
            await first.ask(record.source, weights.record(7, "0" * 64))
        with pytest.raises(WeightsError, match=r"closed the connection|could not reach the source"):
            await second.ask(record.source, record)
        await first.close()
        await second.close()


def test_one_newcomer_more_than_the_limit_drops_the_oldest() -> None:
    dropped: list[int] = []
    newcomers = Newcomers(2)
    for number in range(4):
        newcomers.enter(number, lambda number=number: dropped.append(number))  # type: ignore[misc]
        if number == 1:
            newcomers.leave(0)
    assert dropped == [1]
    assert len(newcomers) == 2


async def test_all_processes_of_a_run_have_one_secret_and_a_bus_that_lost_it_gets_it_back(bus: Bus) -> None:
    first, second, late = RunSecret(bus), RunSecret(bus), RunSecret(bus)
    for secret in (first, second):
        await secret.refresh()
    assert len(first()) == 64
    assert first() == second()
    await bus.call(lambda: raw(bus).delete(bus.keys.named("secret")))
    await second.refresh()
    await late.refresh()
    assert late() == first()
    assert first().decode() not in repr(first)
