"""How much of redis-py's own rate the bus keeps: groups of 16 × 2,048 tokens through publish → consume → hand-over.

Both sides move the same bytes with the same commands (XADD, XREADGROUP, the hand-over script) against the same embedded
Valkey, in turn, several rounds each. Penstock also encodes and decodes every message and decides what to acknowledge;
redis-py alone moves bytes that lie ready. ``ratio`` is the median over rounds of redis-py's seconds ÷ Penstock's in the
same round.

    python -m benchmarks.bus --groups 96 --rounds 15
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from shared.bus import embedded, wire
from shared.bus.bus import Bus
from shared.bus.messages import (
    Experience,
    FinishReason,
    GroupId,
    Prompt,
    RolloutGroup,
    Sample,
    SampleScores,
    Sampling,
    Score,
    ScoreStatus,
)
from shared.bus.streams import EXPERIENCE, ROLLOUTS

SAMPLES, TOKENS, TAKEN_AT_ONCE = 16, 2048, 8


def make_group(generator: np.random.Generator) -> RolloutGroup:
    """Return a group of 16 completions of 2,048 tokens, about four characters of text a token."""
    prompt = Prompt(
        group_id=GroupId(0),
        problem="train.jsonl:1",
        sampling=Sampling(samples=SAMPLES, max_new_tokens=TOKENS, temperature=1.0),
        text="x" * 400,
        answer="42",
    )
    samples = tuple(
        Sample(
            token_ids=generator.integers(0, 152_000, TOKENS).astype(np.int32),
            behavior_logprobs=-generator.random(TOKENS, dtype=np.float32),
            version_spans=np.array([[0, 7], [900, 8]], dtype=np.int32),
            finish_reason=FinishReason.STOP,
            text="abcd" * TOKENS,
        )
        for _ in range(SAMPLES)
    )
    return RolloutGroup(prompt, np.arange(100, dtype=np.int32), samples, "rollout-0", 1.0, 2.0)


def score(group: RolloutGroup) -> Experience:
    """Return the experience of ``group``, as the reward service would."""
    scores = tuple(SampleScores((Score("answer", ScoreStatus.OK, 1.0),)) for _ in group.samples)
    return Experience(group, np.ones(len(group.samples), dtype=np.float32), scores, 3.0, 0.1)


async def through_penstock(bus: Bus, group: RolloutGroup, groups: int) -> None:
    """Publish, consume and hand over ``groups`` messages as the services do."""
    for number in range(groups):
        await bus.publish(ROLLOUTS, group, group_id=str(number))
        if number % TAKEN_AT_ONCE == TAKEN_AT_ONCE - 1:
            for delivery in await bus.read(ROLLOUTS, RolloutGroup, "a", TAKEN_AT_ONCE, block_s=1.0):
                assert await bus.hand_over(delivery, EXPERIENCE, score(delivery.message()))


async def through_redis_py(bus: Bus, group: RolloutGroup, groups: int) -> None:
    """Move the same bytes with the same commands, by redis-py alone."""
    client, source, output = bus.client, bus.keys.of(ROLLOUTS), bus.keys.of(EXPERIENCE)
    sent, scored = wire.encode(group), wire.encode(score(group))
    hand_over = client.register_script((Path(embedded.__file__).parent / "scripts" / "hand_over.lua").read_text())
    for number in range(groups):
        await client.xadd(source, {"id": str(number), "data": sent})
        if number % TAKEN_AT_ONCE == TAKEN_AT_ONCE - 1:
            answer = await client.xreadgroup("reward", "a", {source: ">"}, count=TAKEN_AT_ONCE, block=1000)
            for entry, fields in answer[0][1]:
                assert await hand_over(keys=[source, output], args=["reward", entry, fields[b"id"], scored])


async def measure(url: str, groups: int, rounds: int) -> dict[str, float | int | str]:
    """Return the figures of the JSON line."""
    bus = await Bus.connect(url, "bench", wait_s=10.0, audit_entries=0)
    group = make_group(np.random.default_rng(0))
    sizes = len(wire.encode(group)) + len(wire.encode(score(group)))
    ways: dict[str, Callable[[Bus, RolloutGroup, int], Awaitable[None]]] = {
        "penstock": through_penstock,
        "redis_py": through_redis_py,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first round warms up
        for name, way in ways.items():
            started_s = time.perf_counter()
            await way(bus, group, groups)
            if number:
                seconds[name].append(time.perf_counter() - started_s)
            await bus.client.delete(bus.keys.of(EXPERIENCE))
            await bus.make_groups()
    server, sent = bus.server, wire.encode(group)
    await bus.close()
    ours, theirs = (statistics.median(seconds[name]) for name in ways)
    return {
        "ratio": round(statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)), 3),
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


def _each_ms(work: Callable[[], object], times: int = 50) -> float:
    started_s = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started_s) / times * 1e3


def main() -> None:
    """Start a Valkey, measure, print."""
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
