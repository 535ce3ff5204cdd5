"""What it costs that rank 0 fetches a batch from shelves and gives all of it to every rank.

Two replicas serve the payloads of ``--groups`` scored groups over sockets; ranks are processes with gloo, as a trainer's.

    fetch_alone_s     rank 0 fetches one group at a time, ahead of the step
    fetch_together_s  the same, eight at a time, as the intake does
    share_s           in the step: rank 0's command with all payloads is on every rank, decoded
    share_packed_s    the same with the payloads inside of the packed fields, which copies them three times more on rank 0
                      and twice more on the others, as it was done before
    own_part_s        without it: each rank fetches and decodes 1 / ranks of the groups itself, all ranks at a time

Medians over ``--rounds``, whose kinds alternate.

    python -m benchmarks.trainer.hand_out --groups 16 --ranks 4
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.bus.wire import make_experience, make_group
from penstock.services.trainer.launcher import RANKS_STORE
from penstock.services.trainer.rank0.intake import _FETCHED_AT_ONCE
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind, decode_all, share
from penstock.services.trainer.rank_group import host_group, start_ranks
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.claims import Claim
from penstock.shared.bus.encoding import wire
from tests.support.shelves import LIMITS, reader, served


async def put_all(
    bus: Bus, shelf_of: Sequence[str], folder: Path, groups: int, samples: int, tokens: int, done: Event
) -> None:
    """Serve the payloads until ``done``; write their claims to ``folder``/claims."""
    limits = dataclasses.replace(LIMITS, lost_after_s=30.0)
    async with contextlib.AsyncExitStack() as stack:
        shelves = [
            await stack.enter_async_context(served(bus, folder, name, limits, most_bytes=1 << 40)) for name in shelf_of
        ]
        made = make_group(samples, tokens)
        claims = []
        for number in range(groups):
            own = tuple(
                dataclasses.replace(sample, token_ids=np.roll(sample.token_ids, number)) for sample in made.samples
            )
            payload = wire.encode(make_experience(dataclasses.replace(made, samples=own)))
            claim = await shelves[number % len(shelves)].put(payload, number)
            assert claim is not None
            claims.append(wire.encode(claim))
        (folder / "claims.part").write_bytes(msgpack.packb(claims))
        (folder / "claims.part").rename(folder / "claims")
        while not done.is_set():
            await asyncio.sleep(0.05)


def serve(url: str, folder: Path, groups: int, samples: int, tokens: int, done: Event) -> None:
    """Run the replicas."""

    async def run() -> None:
        bus = await Bus.connect(url, "bench", wait_s=10.0)
        await put_all(bus, ("rollout-0", "rollout-1"), folder, groups, samples, tokens, done)
        await bus.close()

    asyncio.run(run())


def share_packed(payloads: Sequence[bytes]) -> int:
    """Return the number of groups that are on every rank."""
    rank, data = dist.get_rank(), msgpack.packb(list(payloads))
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, src=0, group=host_group())
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if rank == 0:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0, group=host_group())
    return len(payloads if rank == 0 else decode_all(msgpack.unpackb(buffer.numpy().tobytes())))


async def fetched(url: str, folder: Path, claims: Sequence[bytes], at_once: int) -> tuple[float, list[bytes]]:
    """Return the seconds, and the payloads."""
    bus = await Bus.connect(url, "bench", wait_s=10.0)
    shelf = reader(bus, folder / f"rank-{dist.get_rank()}")
    started_s = time.perf_counter()
    payloads: list[bytes] = []
    for start in range(0, len(claims), at_once):
        some = [wire.decode(claim, Claim) for claim in claims[start : start + at_once]]
        payloads += await asyncio.gather(*map(shelf.fetch, some))
    seconds = time.perf_counter() - started_s
    await bus.close()
    return seconds, payloads


def measure(rank: int, ranks: int, url: str, folder: Path, rounds: int) -> None:
    """Run one rank; rank 0 writes the figures."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        RANKS_STORE: str(folder / "store"),
    }
    start_ranks("cpu")
    claims = msgpack.unpackb((folder / "claims").read_bytes())
    seconds: dict[str, list[float]] = {
        "fetch_alone_s": [], "fetch_together_s": [], "share_s": [], "share_packed_s": [], "own_part_s": []
    }  # fmt: skip
    nbytes = 0
    for _ in range(rounds):
        payloads: list[bytes] = []
        if rank == 0:
            for name, at_once in (("fetch_alone_s", 1), ("fetch_together_s", _FETCHED_AT_ONCE)):
                taken_s, payloads = asyncio.run(fetched(url, folder, claims, at_once))
                seconds[name].append(taken_s)
            nbytes = sum(map(len, payloads))
        command = (
            Command(CommandKind.TRAIN, payloads=tuple(payloads), groups=decode_all(payloads)) if rank == 0 else None
        )
        dist.barrier(host_group())
        started_s = time.perf_counter()
        assert len(share(command).groups) == len(claims)
        dist.barrier(host_group())
        seconds["share_s"].append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        assert share_packed(payloads) == len(claims)
        dist.barrier(host_group())
        seconds["share_packed_s"].append(time.perf_counter() - started_s)
        taken_s, own = asyncio.run(fetched(url, folder, claims[rank::ranks], _FETCHED_AT_ONCE))
        started_s = time.perf_counter()
        assert decode_all(own)
        slowest = torch.tensor([taken_s + time.perf_counter() - started_s])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, host_group())
        seconds["own_part_s"].append(float(slowest))
    if rank == 0:
        figures = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
        (folder / "figures.json").write_text(json.dumps({"nbytes": nbytes, **figures}))
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    context, shape = mp.get_context("spawn"), (given.groups, given.samples, given.tokens)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        embedded.serving(Path(name) / "valkey") as url,
    ):
        folder, done = Path(name), context.Event()
        serving = context.Process(target=serve, args=(url, folder, *shape, done))
        serving.start()
        while not (folder / "claims").exists():
            assert serving.is_alive()
            time.sleep(0.1)
        try:
            ranks = [
                context.Process(target=measure, args=(rank, given.ranks, url, folder, given.rounds))
                for rank in range(given.ranks)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        finally:
            done.set()
            serving.join()
        figures = json.loads((folder / "figures.json").read_text())
    trained = given.groups * given.samples * given.tokens
    shown = {"benchmark": "hand_out", "groups": given.groups, "samples": given.samples, "tokens": given.tokens}
    per_million = {"share_ms_per_million_tokens": round(figures["share_s"] * 1e9 / trained, 2)}
    print(json.dumps({**shown, "ranks": given.ranks, "rounds": given.rounds, **figures, **per_million}))


if __name__ == "__main__":
    main()
