"""Bytes that the bus carries for long samples, and how long a commit holds it, with payloads on shelves and without.

Groups of ``--samples`` × ``--tokens`` go from ``prompts`` to ``experience`` and are committed in one step, over a real
Valkey; two replicas and a reward service serve their shelves over sockets, each payload on two of them.

    bytes_per_token   the server's network input and output, from admission to the commit included, per completion token
    commit_ms         the commit of one step with all groups
    memory_mb         the server's memory before the commit
    hand_over_ms_per_sample   with the second copy, of a sample

    python -m benchmarks.bus.shelves --groups 64 --inline-groups 4
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.bus.wire import make_experience, make_group
from penstock.shared.bus import embedded
from penstock.shared.bus.assembly import bare
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Experience, GroupId, PolicyVersion, Prompt, RolloutGroup, StepReport
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.streams import EXPERIENCE, PROMPTS, ROLLOUTS
from tests.support.coordinator_players import record
from tests.support.raw_redis import raw
from tests.support.shelves import LIMITS, reader, served

ABOVE_BYTES = 65_536


async def run_groups(buses: dict[str, Bus], groups: int, samples: int, tokens: int) -> dict[str, float]:
    """Return the figures of ``groups`` in one step."""
    bus = buses["trainer"]
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    epoch = await ledger.take_epoch()
    await ledger.commit(epoch, record(0, None, 0), [], None)
    made = make_group(samples, tokens)
    before = await raw(bus).info("stats")
    prompts = [dataclasses.replace(made.prompt, group_id=GroupId(number)) for number in range(groups)]
    assert await ledger.admit(prompts, groups, groups, 1, PolicyVersion(0)) == groups
    put_s = 0.0
    for number in range(groups * samples):
        replica = f"rollout-{number % 2}"
        (taken,) = await buses[replica].read(PROMPTS, Prompt, replica, 1, None)
        prompt = taken.message()
        sample = made.samples[prompt.sample or 0]
        ids = np.roll(sample.token_ids, number)  # no payload is another's
        part = dataclasses.replace(made, prompt=bare(prompt), samples=(dataclasses.replace(sample, token_ids=ids),))
        started_s = time.perf_counter()
        assert await buses[replica].hand_over(taken, ROLLOUTS, part)
        put_s += time.perf_counter() - started_s
    for _ in range(groups):
        reward = buses["reward-0"]
        (scored,) = await reward.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
        whole = dataclasses.replace(scored, data=await reward.whole(scored.data)).message()
        assert await reward.hand_over(scored, EXPERIENCE, make_experience(whole))
    batch = []
    for _ in range(groups):
        batch += await bus.read(EXPERIENCE, Experience, "trainer", 1, None)
        assert len(await bus.whole(batch[-1].data)) > samples * tokens * 8
    memory = await raw(bus).info("memory")
    report = StepReport(1, PolicyVersion(1), 1.5e9, groups * samples, {}, {})
    started_s = time.perf_counter()
    await ledger.commit(epoch, record(1, 0, 1), batch, report)
    commit_ms = (time.perf_counter() - started_s) * 1e3
    after = await raw(bus).info("stats")
    moved = sum(after[name] - before[name] for name in ("total_net_input_bytes", "total_net_output_bytes"))
    return {
        "groups": groups,
        "payload_mb": round(groups * samples * tokens * 12 / 1e6, 1),
        "bytes_per_token": round(moved / (groups * samples * tokens), 4),
        "commit_ms": round(commit_ms, 2),
        "memory_mb": round(memory["used_memory"] / 1e6, 1),
        "hand_over_ms_per_sample": round(put_s / (groups * samples) * 1e3, 2),
    }


async def measure(url: str, groups: int, samples: int, tokens: int, *, shelves: bool) -> dict[str, float]:
    """Return the figures with shelves, or without."""
    names = ("rollout-0", "rollout-1", "reward-0", "trainer")
    run = f"bench-{int(shelves)}"
    buses = {name: await Bus.connect(url, run, wait_s=10.0, audit_entries=0) for name in names}
    limits = dataclasses.replace(LIMITS, above_bytes=ABOVE_BYTES, lost_after_s=30.0)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            if shelves:
                for name in names[:3]:
                    serving = served(buses[name], Path(folder), name, limits, most_bytes=1 << 40)
                    buses[name].shelf = await stack.enter_async_context(serving)
                buses["trainer"].shelf = reader(buses["trainer"], Path(folder), limits)
            figures = await run_groups(buses, groups, samples, tokens)
        assert (len(list(Path(folder).glob("*/*"))) > 0) == shelves
    for bus in buses.values():
        await bus.close()
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--inline-groups", type=int, default=4, help="without shelves, where the server holds them all")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131_072)
    arguments = parser.parse_args()
    shape = (arguments.samples, arguments.tokens)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        embedded.serving(Path(folder) / "valkey") as url,
    ):
        shelved = asyncio.run(measure(url, arguments.groups, *shape, shelves=True))
        inline = asyncio.run(measure(url, arguments.inline_groups, *shape, shelves=False))
    ratio = round(shelved["bytes_per_token"] / inline["bytes_per_token"], 5)
    shown = {"samples": shape[0], "tokens": shape[1], "shelved": shelved, "inline": inline, "bytes_ratio": ratio}
    print(json.dumps({"benchmark": "shelves", **shown}))


if __name__ == "__main__":
    main()
