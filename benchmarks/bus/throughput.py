"""Bus throughput relative to redis-py: groups of 16 × 2,048 tokens through publish, consume, hand-over.

Both send the same commands to the same Valkey, alternately; redis-py by its own client, and messages encoded before.
``ratio``: median of redis-py's seconds / Penstock's; ``cpu_ratio``: of the processor time of this process.

    python -m benchmarks.bus.throughput --groups 96 --rounds 15
"""

import argparse
import asyncio
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.bus.wire import make_experience, make_group
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import CAUSES, CRASHES, Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import ASSEMBLY, COUNTS, GENERATING, PAYLOADS, RUN
from penstock.shared.bus.messages import RolloutGroup
from penstock.shared.bus.streams import AUDIT, EXPERIENCE, ROLLOUTS
from tests.support.raw_redis import raw, redis_py, script_text

SAMPLES, TOKENS, TAKEN_AT_ONCE = 16, 2048, 8


async def through_penstock(bus: Bus, group: RolloutGroup, groups: int) -> None:
    """Publish, consume and hand over ``groups`` messages."""
    for number in range(groups):
        await bus.publish(ROLLOUTS, group, group_id=str(group.group_id))
        if number % TAKEN_AT_ONCE == TAKEN_AT_ONCE - 1:
            for delivery in await bus.read(ROLLOUTS, RolloutGroup, "a", TAKEN_AT_ONCE, block_s=1.0):
                assert await bus.hand_over(delivery, EXPERIENCE, make_experience(delivery.message()))


async def through_redis_py(client: Any, bus: Bus, group: RolloutGroup, groups: int) -> None:
    """Do the same with redis-py alone."""
    source, output = bus.keys.of(ROLLOUTS), bus.keys.of(EXPERIENCE)
    sent, scored = wire.encode(group), wire.encode(make_experience(group))
    hand_over = client.register_script(script_text("hand_over"))
    keys = [source, output, bus.keys.of(GENERATING), bus.keys.of(ASSEMBLY.of(str(group.group_id)))]
    keys += [bus.keys.of(key) for key in (CRASHES, CAUSES, COUNTS, AUDIT, RUN, PAYLOADS)]
    for number in range(groups):
        await client.xadd(source, {"id": str(group.group_id), "data": sent})
        if number % TAKEN_AT_ONCE == TAKEN_AT_ONCE - 1:
            answer = await client.xreadgroup("reward", "a", {source: ">"}, count=TAKEN_AT_ONCE, block=1000)
            for entry, fields in answer[0][1]:
                assert await hand_over(
                    keys, ["reward", ROLLOUTS.name, fields[b"id"], scored, "", 0, EXPERIENCE.name, "", entry]
                )


async def measure(url: str, groups: int, rounds: int) -> dict[str, float | int | str]:
    """Return the result."""
    bus = await Bus.connect(url, "bench", wait_s=10.0, audit_entries=0)
    group, client = make_group(SAMPLES, TOKENS), redis_py(url)
    sizes = len(wire.encode(group)) + len(wire.encode(make_experience(group)))
    ways: dict[str, Callable[[Bus, RolloutGroup, int], Awaitable[None]]] = {
        "penstock": through_penstock,
        "redis_py": functools.partial(through_redis_py, client),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first round warms up
        for name, way in ways.items():
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            await way(bus, group, groups)
            if number:
                seconds[name].append(time.perf_counter() - started_s)
                cpu[name].append(time.process_time() - started_cpu_s)
            await raw(bus).delete(bus.keys.of(EXPERIENCE))
            await bus.make_groups()
    server, sent = bus.server, wire.encode(group)
    await bus.close()
    await client.aclose()
    ours, theirs = (statistics.median(seconds[name]) for name in ways)
    return {
        "ratio": _ratio(seconds),
        "cpu_ratio": _ratio(cpu),
        "groups_per_s": round(groups / ours, 1),
        "mb_per_s": round(groups * sizes / ours / 1e6, 1),
        "redis_py_groups_per_s": round(groups / theirs, 1),
        "encode_ms": round(_each_ms(lambda: wire.encode(group)), 3),
        "decode_ms": round(_each_ms(lambda: wire.decode(sent, RolloutGroup)), 3),
        "message_kb": round(len(sent) / 1e3, 1),
        "groups": groups,
        "rounds": rounds,
        "server": server,
    }


def _ratio(seconds: dict[str, list[float]]) -> float:
    pairs = zip(*seconds.values(), strict=True)
    return round(float(statistics.median(theirs / ours for ours, theirs in pairs)), 3)


def _each_ms(work: Callable[[], object], times: int = 50) -> float:
    started_s = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started_s) / times * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=96, help="groups a round, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        embedded.serving(Path(folder) / "valkey") as url,
    ):
        print(json.dumps(asyncio.run(measure(url, arguments.groups, arguments.rounds))))


if __name__ == "__main__":
    main()
