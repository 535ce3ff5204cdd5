"""Laws of sharded snapshots: real ranks under ZeRO 1 to 3, real pulls by replicas in other processes, over gloo."""

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.services.rollout.engines.vllm.swap.share_plan import agree
from penstock.shared.bus.messages import PolicyRecord
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Layout
from penstock.shared.weights.format.shares import Piece, Share, check_sums, copy, places
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import DeviceLocation
from tests.conftest import PATIENCE_S, until
from tests.support import forge, weights
from tests.support.sharing_ranks import VERSION
from tests.support.weights_players import CPU, Replica, Start, fingerprint, players

pytestmark = pytest.mark.slow

DEADLINE_S = PATIENCE_S


@contextlib.contextmanager
def trainer(folder: Path, ranks: int, stages: str, *held: str) -> Iterator[forge.Started]:
    words = [ranks, "tests.support.sharing_ranks", folder, stages, *held]
    with (folder / "trainer.txt").open("a") as output:
        process = forge.start("tests.support.launched_ranks", words, output, OMP_NUM_THREADS="1")
    try:
        yield process
    finally:
        process.kill()  # its ranks end with it
        process.wait(PATIENCE_S)


async def published(folder: Path, stage: str, process: forge.Started) -> dict[str, Any]:
    path = folder / f"zero-{stage}.json"
    await until(lambda: path.exists() or process.poll() is not None, 300)
    assert path.exists(), (folder / "trainer.txt").read_text()[-3000:]
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def record(of: dict[str, Any]) -> PolicyRecord:
    return weights.record(VERSION, of["where"]["digest"], source=of["where"]["source"])


@pytest.fixture
def start() -> Iterator[Start]:
    yield from players(DEADLINE_S)


async def by_file(asked: PolicyRecord) -> str:
    puller = Puller(DeviceLocation(), 1, DEADLINE_S, weights.secret)
    offer = await puller.ask_for_file(asked.source, asked)
    shadow = FlatSnapshot(offer.layout, CPU)
    await asyncio.to_thread(Receiver(1, 1, CPU).receive, Offer.unpack(offer.pack()), shadow)
    await puller.close()
    return fingerprint(shadow.tensors().items())


def halved(layout: Layout, ranks: int) -> list[Share]:
    """Divide every tensor among ``ranks``, by rows, by columns, or not at all, as layers are."""
    pieces: list[list[list[Piece]]] = [[[] for _ in layout.bucket_bytes] for _ in range(ranks)]
    for number, entry in enumerate(layout.tensors):
        rows, columns = entry.shape[0], math.prod(entry.shape[1:])
        wide = entry.nbytes // rows
        for rank, own in enumerate(pieces):
            if number % 3 == 0 and rows % ranks == 0:
                piece = Piece(entry.offset + rank * entry.nbytes // ranks, entry.nbytes // ranks)
            elif number % 3 == 1 and columns % ranks == 0 and columns > 1:
                piece = Piece(entry.offset + rank * wide // ranks, wide // ranks, ((rows, wide),))
            else:
                piece = Piece(entry.offset, entry.nbytes)
            own[entry.bucket].append(piece)
    return agree(layout, [tuple(map(tuple, own)) for own in pieces])


async def by_shares(source: str, asked: PolicyRecord, ranks: int) -> str:
    """Pull as a replica of ``ranks``; return the fingerprint of what these hold together."""
    puller = Puller(DeviceLocation(), ranks, DEADLINE_S, weights.secret)
    offer = await puller.ask(source, asked)
    shares = halved(offer.layout, ranks)
    shadows = [FlatSnapshot(offer.layout, CPU, packed=share) for share in shares]
    receivers = [Receiver(rank + 1, ranks, CPU) for rank in range(ranks)]
    told = Offer.unpack(offer.pack())
    each = zip(receivers, shadows, shares, strict=True)
    sums = await asyncio.gather(*(asyncio.to_thread(of.receive, told, into, share) for of, into, share in each))
    check_sums(sums, offer.header.checksums, source)
    await puller.finish(offer, None)
    await puller.close()
    whole = FlatSnapshot(offer.layout, CPU)
    for share, shadow in zip(shares, shadows, strict=True):
        for pieces, slot, bucket in zip(share.pieces, shadow.buckets, whole.buckets, strict=True):
            copy(
                [
                    (piece.of(bucket), piece.packed(slot, place))
                    for piece, place in zip(pieces, places(pieces), strict=True)
                ]
            )
    for receiver in receivers:
        receiver.close()
    return fingerprint(whole.tensors().items())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
async def test_replicas_pull_the_trained_bytes_from_all_ranks_and_each_rank_keeps_its_share(
    tmp_path: Path, start: Start, ranks: int
) -> None:
    first, second = start(Replica), start(Replica)
    with trainer(tmp_path, ranks, "1,2,3,3-merged") as process:
        for stage in ("1", "2", "3", "3-merged"):
            made = await published(tmp_path, stage, process)
            source = made["where"]["source"]
            assert first.call("pull", source, record(made)) == made["fingerprint"]
            assert len(first.call("sessions")) >= ranks
            assert second.call("pull", first.call("address"), record(made)) == made["fingerprint"]
            assert await by_file(record(made)) == made["fingerprint"]
            for parallel in (2, 4):
                assert await by_shares(source, record(made), parallel) == made["fingerprint"]
                assert await by_shares(first.call("address"), record(made), parallel) == made["fingerprint"]
            assert sum(made["snapshots"]) == pytest.approx(2 * made["whole"], rel=0.05)
            assert max(made["snapshots"]) < 1.35 * 2 * made["whole"] / ranks


@pytest.mark.timeout(600)
async def test_a_rank_killed_during_a_pull_ends_it_and_the_next_trainer_is_pulled(tmp_path: Path, start: Start) -> None:
    replica = start(Replica)
    with trainer(tmp_path, 2, "3", "held") as process:
        made = await published(tmp_path, "3", process)
        pull = replica.later("pull", made["where"]["source"], record(made))
        replica.until("arrived", lambda buckets: buckets == 1)  # of rank 0; the second is rank 1's
        os.kill(made["pids"][1], signal.SIGKILL)
        with pytest.raises(WeightsError):
            replica.result(pull, 2 * DEADLINE_S)
        assert replica.call("holds") is None
        assert process.wait(PATIENCE_S) != 0
    (tmp_path / "zero-3.json").unlink()
    with trainer(tmp_path, 2, "3") as process:
        made = await published(tmp_path, "3", process)
        assert replica.call("pull", made["where"]["source"], record(made)) == made["fingerprint"]
