"""Model-free workers over the real bus, for the coordinator's tests."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.services.coordinator.api import dependencies, middleware
from penstock.services.coordinator.data import load_data
from penstock.services.coordinator.service import Coordinator, assemble
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import GENERATING
from penstock.shared.bus.messages import (
    Experience,
    FinishReason,
    PolicyRecord,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Sample,
    SampleScores,
    Score,
    ScoreStatus,
    StepReport,
)
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.streams import Stream
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from tests.conftest import PATIENCE_S

Reward = Callable[[Prompt], float]

for module in (dependencies, middleware):
    module.ANSWER_WITHIN_S = PATIENCE_S  # type: ignore[attr-defined]


def write_problems(path: Path, count: int) -> Path:
    """Row i asks "i+i=" and answers 2i."""
    path.write_text("".join(f'{{"prompt": "{i}+{i}=", "answer": {2 * i}}}\n' for i in range(count)), encoding="utf-8")
    return path


def settings(folder: Path, *, steps: int = 4, heldout: int = 0, problems: int = 10, **more: dict[str, Any]) -> Settings:
    """Two groups a step, four slots, two samples a group."""
    values: dict[str, dict[str, Any]] = {
        "run": {"id": "test", "folder": folder / "runs", "steps": steps},
        "bus": {"drain_s": 1.0},
        "data": {"path": write_problems(folder / "train.jsonl", problems)},
        "evaluation": {"every_steps": 2, "problems": 3},
        "sampling": {"group_size": 2, "max_new_tokens": 4},
        "algorithm": {"groups_per_step": 2, "max_lag": 1},
        "weights": {"deadline_s": PATIENCE_S},
    }
    if heldout:
        values["evaluation"]["path"] = write_problems(folder / "heldout.jsonl", heldout)
    for section, changed in more.items():
        values[section] = {**values.get(section, {}), **changed}
    return Settings.model_validate(values)


def make(bus: Bus, run: Settings) -> Coordinator:
    run.run_folder.mkdir(parents=True, exist_ok=True)
    return assemble(bus, Live(bus, run), load_data(run), run.run_folder, Status(state="working"))


@contextlib.asynccontextmanager
async def running(parts: Coordinator) -> AsyncIterator[Coordinator]:
    """Run every loop of a leading coordinator, then kill it without notice."""
    tasks = [asyncio.create_task(loop()) for loop in (*parts.leading, parts.monitor.run)]
    try:
        yield parts
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
            raise error


class Trainer:
    def __init__(self, bus: Bus, groups: int = 2) -> None:
        self.bus = bus
        self.ledger = Ledger(bus)
        self.groups = groups
        self.epoch = 0

    async def start(self) -> "Trainer":
        self.epoch = await self.ledger.take_epoch()
        if (await self.ledger.status()).newest_version is None:
            await self.ledger.commit(self.epoch, record(0, None, 0), [], None)
        return self

    async def take(self) -> list[Any]:
        """Take and note a batch."""
        batch: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(batch) < self.groups:
                batch += await self.bus.read(
                    streams.EXPERIENCE, Experience, "trainer", self.groups - len(batch), block_s=0.05
                )
        await self.ledger.note_batch([delivery.entry_id for delivery in batch])
        return batch

    async def step(self, **metrics: float) -> int:
        return await self.commit(await self.take(), **metrics)

    async def commit(self, batch: list[Any], **metrics: float) -> int:
        """Commit ``batch`` with ``metrics`` in the report, and return the step."""
        status = await self.ledger.status()
        assert status.newest_version is not None
        step, version = status.step + 1, status.newest_version + 1
        told = report(step, version)
        told = dataclasses.replace(told, finished_at_s=time.time(), metrics=told.metrics | metrics) if metrics else told
        await self.ledger.commit(self.epoch, record(version, status.newest_version, step), batch, told)
        return step


async def generating(bus: Bus) -> list[Prompt]:
    """Return the prompts of the groups that are being generated, in the order of admission."""
    prompts = [wire.decode(data, Prompt) for data in (await bus.hgetall(GENERATING)).values()]
    return sorted(prompts, key=lambda prompt: prompt.group_id)


def record(version: int, parent: int | None, step: int) -> PolicyRecord:
    return PolicyRecord(
        version=PolicyVersion(version),
        parent=None if parent is None else PolicyVersion(parent),
        step=step,
        created_at_s=time.time(),
        manifest_digest="ab" * 32,
        location=f"/snapshots/{version}",
        metrics={"reward_mean": 0.5},
    )


def report(step: int, version: int, samples: int = 4) -> StepReport:
    """Step s: reward s/10, 10 response tokens a sample, three samples at lag 0 and one at lag 1."""
    return StepReport(
        step=step,
        version=PolicyVersion(version),
        finished_at_s=100.0 + step,
        samples=samples,
        metrics={
            "reward_mean": step / 10,
            "response_tokens_mean": 10.0,
            "tokens_per_s": 50.0,
            "step_s": 1.0,
            "kl_max": float("nan"),
        },
        lag_counts={"0": 3, "1": 1},
    )


@contextlib.asynccontextmanager
async def replicas(bus: Bus, reward: Reward = lambda prompt: 1.0, evaluating: bool = True) -> AsyncIterator[None]:
    async def generate(prompt: Prompt) -> RolloutGroup:
        sample = Sample(
            token_ids=np.arange(3, dtype=np.int32),
            behavior_logprobs=np.full(3, -0.5, dtype=np.float32),
            version_spans=np.array([[0, prompt.min_version]], dtype=np.int32),
            finish_reason=FinishReason.STOP,
            text=prompt.answer or "",
        )
        ids = np.array([5], dtype=np.int32)
        samples = prompt.sampling.samples if prompt.sample is None else 1
        return RolloutGroup(prompt, ids, (sample,) * samples, "rollout-0", 1.0, 2.0)

    async def score(group: RolloutGroup) -> Experience:
        value = reward(group.prompt)
        scores = SampleScores((Score("answer", ScoreStatus.OK, value),))
        rewards = np.full(len(group.samples), value, dtype=np.float32)
        return Experience(group, rewards, (scores,) * len(group.samples), 3.0, 0.1)

    patience = Patience(claim_after_s=PATIENCE_S, max_attempts=1, drain_s=0.0)
    routes: list[tuple[Stream, Any, Stream, Any]] = [
        (streams.PROMPTS, Prompt, streams.ROLLOUTS, generate),
        (streams.ROLLOUTS, RolloutGroup, streams.EXPERIENCE, score),
    ]
    if evaluating:
        routes += [
            (streams.EVAL_PROMPTS, Prompt, streams.EVAL_ROLLOUTS, generate),
            (streams.EVAL_ROLLOUTS, RolloutGroup, streams.EVAL_RESULTS, score),
        ]
    stop = asyncio.Event()
    workers: list[Worker[Any, Any]] = [
        Worker(bus, "replica", source, kind, output, handler, 8, patience) for source, kind, output, handler in routes
    ]
    tasks = [asyncio.create_task(worker.run(stop)) for worker in workers]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)
