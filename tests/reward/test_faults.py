"""A reward service with failing parts, real scorers and a real Valkey: a group is scored, retried or buried with the
reason, exactly once, and never scored 0 for others' faults.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.reward.scorers.answer.scorer import COMMAND
from penstock.services.reward.scoring import Scoring
from penstock.services.reward.service import make_scoring
from penstock.services.reward.subprocess_pool import pool
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, RolloutGroup
from penstock.shared.bus.streams import AUDIT, EXPERIENCE, ROLLOUTS
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.errors import StateLost
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from tests.conftest import PATIENCE_S, until
from tests.support import builders, reward_models
from tests.support.children import children
from tests.support.raw_redis import raw

TEXTS = ("46", "4", "47", "2")
Forward = Callable[..., Any]


def settings(folder: Path, mode: str = "exact", **models: Any) -> Settings:
    return Settings.model_validate(
        {
            "run": {"device": "cpu", "threads": 1},
            "reward": {
                "models": models,
                "expression": "answer + 0 * model",
                "scorers": [
                    {"kind": "answer", "mode": mode, "extract": "whole"},
                    {"kind": "model", "model": str(folder)},
                ],
            },
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return reward_models.save(reward_models.qwen(), tmp_path)


class Replica:
    def __init__(self, bus: Bus, of: Settings, name: str = "reward-0", max_attempts: int = 3) -> None:
        self.status = Status()
        self.scoring: Scoring = make_scoring(of, self.status, bus)
        patience = Patience(claim_after_s=PATIENCE_S, max_attempts=max_attempts, retry_s=0.01, drain_s=5.0)
        self.worker = Worker(
            bus, name, ROLLOUTS, RolloutGroup, EXPERIENCE, self.scoring, of.internal.reward_groups, patience
        )
        self.stop = asyncio.Event()

    @property
    def model(self) -> Any:
        scorer: Any = self.scoring._scorers[1]
        return scorer._model._placed.module

    def hurt(self, harm: Callable[[Forward, torch.Tensor], Any]) -> None:
        """Let ``harm`` change forward passes."""
        whole = self.model.forward
        self.model.forward = lambda input_ids, attention_mask: harm(
            lambda: whole(input_ids=input_ids, attention_mask=attention_mask), input_ids
        )

    async def run(self) -> None:
        try:
            await self.worker.run(self.stop)
        finally:
            await self.scoring.close()


@contextlib.asynccontextmanager
async def working(replica: Replica) -> AsyncIterator[Replica]:
    async with asyncio.TaskGroup() as running:
        running.create_task(replica.run())
        yield replica
        replica.stop.set()


async def put(bus: Bus, count: int) -> None:
    for group_id in range(count):
        await bus.append(ROLLOUTS, {"id": str(group_id), "data": wire.encode(builders.group(group_id, TEXTS))})


async def audit(bus: Bus, groups: int) -> tuple[dict[int, list[float]], dict[int, str]]:
    """Return rewards and burial reasons after ``groups`` have ended, each once."""

    async def all_ended() -> bool:
        return await bus.length(EXPERIENCE) + await bus.length(ROLLOUTS.dead) == groups

    await until(all_ended)
    entries = await raw(bus).xrange(bus.keys.of(EXPERIENCE))
    scored = [wire.decode(fields[b"data"], Experience) for _, fields in entries]
    rewards = {int(entry.group.prompt.group_id): entry.rewards.tolist() for entry in scored}
    dead = await raw(bus).xrange(bus.keys.of(ROLLOUTS.dead))
    buried = {int(fields[b"id"]): fields[b"reason"].decode() for _, fields in dead}
    assert len(entries) == len(rewards)
    assert sorted([*rewards, *buried]) == list(range(groups))
    assert (await bus.counts()).get("dead:rollouts", 0) == len(buried)
    endings = [int(fields[b"id"]) for _, fields in await raw(bus).xrange(bus.keys.of(AUDIT))]
    assert sorted(endings) == sorted(buried)
    assert await bus.length(ROLLOUTS) == 0
    return rewards, buried


async def test_a_reward_model_that_runs_out_of_memory_scores_in_smaller_batches(bus: Bus, folder: Path) -> None:
    replica = Replica(bus, settings(folder, batch_tokens=400))
    rows: list[int] = []

    def full(forward: Forward, input_ids: torch.Tensor) -> Any:
        rows.append(len(input_ids))
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward()

    await replica.scoring.start()
    replica.hurt(full)
    await put(bus, 6)
    async with working(replica):
        rewards, buried = await audit(bus, 6)
    assert rewards == {group: [1.0, 0.0, 0.0, 0.0] for group in range(6)}
    assert buried == {}
    assert max(rows) > 3


async def test_a_sample_that_fits_in_no_batch_buries_its_group_with_the_reason_and_scores_the_others(
    bus: Bus, folder: Path
) -> None:
    replica = Replica(bus, settings(folder))

    def too_long(forward: Forward, input_ids: torch.Tensor) -> Any:
        if input_ids.shape[1] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward()

    await replica.scoring.start()
    replica.hurt(too_long)
    await put(bus, 3)
    long = builders.group(3, ("46", "00000046"))
    await bus.append(ROLLOUTS, {"id": "3", "data": wire.encode(long)})
    async with working(replica):
        rewards, buried = await audit(bus, 4)
    assert sorted(rewards) == [0, 1, 2]
    assert buried == {
        3: "scorer 'model' unavailable: no memory for a sample of 14 tokens: CUDA out of memory. Tried to allocate 2.00 GiB "
        "(train.jsonl:4)"
    }


async def test_a_model_that_gives_no_number_is_unavailable(bus: Bus, folder: Path) -> None:
    replica = Replica(bus, settings(folder))
    await replica.scoring.start()
    torch.nn.init.constant_(replica.model.score.weight, float("nan"))
    await put(bus, 1)
    async with working(replica):
        _, buried = await audit(bus, 1)
        assert replica.status.state == "degraded"
    assert buried == {0: "scorer 'model' unavailable: the model gave nan (train.jsonl:1)"}


async def test_a_device_that_dies_stops_the_replica_and_another_scores_what_it_held(bus: Bus, folder: Path) -> None:
    first, second = Replica(bus, settings(folder)), Replica(bus, settings(folder), "reward-1")

    def die(forward: Forward, input_ids: torch.Tensor) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    await first.scoring.start()
    first.hurt(die)
    await put(bus, 3)
    with pytest.raises(StateLost, match="device-side assert"):
        await first.run()
    assert await bus.length(EXPERIENCE) == 0
    await second.scoring.start()
    async with working(second):
        rewards, _ = await audit(bus, 3)
    assert sorted(rewards) == [0, 1, 2]


async def test_a_matcher_that_stands_still_is_no_verdict_on_the_answer(
    bus: Bus, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(bus, settings(folder, mode="math"))
    await replica.scoring.start()
    templates = children(COMMAND[-1])
    assert templates
    await until(lambda: all(template.children() for template in templates))  # forked, which follows their being ready
    for matcher in children(COMMAND[-1], recursive=True):
        matcher.suspend()
    monkeypatch.setattr(pool, "PATIENCE", 5)
    sentences = ("it is $\\sqrt[3]{97336}$", "it is $\\sqrt[3]{103823}$")  # need computer algebra
    group = builders.group(0, sentences)
    await bus.append(ROLLOUTS, {"id": "0", "data": wire.encode(group)})
    async with working(replica):
        await until(lambda: replica.worker.counts.retried == 1)  # the state that it caused may be over already
        monkeypatch.setattr(pool, "PATIENCE", 1000)
        assert "made no progress" in replica.worker.counts.last_error
        rewards, buried = await audit(bus, 1)
        assert replica.status.state == "working"
    assert (rewards, buried) == ({0: [1.0, 0.0]}, {})


async def test_a_slow_scorer_holds_a_bounded_number_of_groups_and_the_rest_stays_on_the_bus(
    bus: Bus, folder: Path
) -> None:
    of = settings(folder)
    of = of.model_copy(update={"internal": of.internal.model_copy(update={"reward_groups": 2})})
    replica = Replica(bus, of)
    await replica.scoring.start()
    batcher: Any = replica.scoring._scorers[1]
    gate, compute = asyncio.Event(), batcher._batcher._compute

    async def slow(batch: Any) -> None:
        await gate.wait()
        await compute(batch)

    batcher._batcher._compute = slow
    await put(bus, 8)
    async with working(replica):
        await until(lambda: replica.worker.held == 2)
        await asyncio.sleep(0)
        assert (await bus.depth(ROLLOUTS)).pending == 2
        assert await bus.length(ROLLOUTS) == 8
        gate.set()
        rewards, _ = await audit(bus, 8)
    assert len(rewards) == 8


async def test_rules_and_the_model_work_on_a_group_at_the_same_time(bus: Bus, folder: Path) -> None:
    replica = Replica(bus, settings(folder))
    await replica.scoring.start()
    rule_began, model_began = threading.Event(), threading.Event()
    seen: list[bool] = []

    def meet(forward: Forward, input_ids: torch.Tensor) -> Any:
        model_began.set()
        seen.append(rule_began.wait(PATIENCE_S))
        return forward()

    rule: Any = replica.scoring._scorers[0]
    score = rule.score

    async def score_in_the_meantime(group: RolloutGroup) -> Any:
        rule_began.set()
        seen.append(await asyncio.to_thread(model_began.wait, PATIENCE_S))
        return await score(group)

    replica.hurt(meet)
    rule.score = score_in_the_meantime
    try:
        experience = await replica.scoring(builders.group(0, TEXTS))
    finally:
        await replica.scoring.close()
    assert experience.rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert seen == [True, True], "each waited for the other to begin"
