"""The law of length: with ``on_stale = "wait"`` a sample is trained however long it is.

Bus, admission, promotion, replica, workers and the trainer's intake are real; decoding is a sleep for each token, and
steps train nothing. A sample in thirty is so long that several steps could be made meanwhile.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.services.coordinator.admission.admission import Admission, terms_of
from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.admission.dataset import Dataset, Problem
from penstock.services.coordinator.admission.mixing import EpochOrder
from penstock.services.coordinator.policies.promotion import Promotion
from penstock.services.reward.scorers.scorer import valued
from penstock.services.reward.scoring import Scoring
from penstock.services.rollout.engines.engine import GeneratedGroup, GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.prompts import CharacterCodec
from penstock.services.rollout.engines.scripted import ScriptedEngine
from penstock.services.rollout.service import Rollout, seeds_of
from penstock.services.trainer.rank0.intake import Intake, Taken
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import FinishReason, PolicyRecord, PolicyVersion, RolloutGroup, Score, ScoreStatus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.streams import EXPERIENCE, ROLLOUTS
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.expression import Expression
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import Puller
from tests.conftest import PATIENCE_S
from tests.support import replicas, weights

STEPS, GROUPS, SAMPLES = 12, 8, 4
LONGEST = 400
TOKEN_S = 0.002
TOLERANCE = 0.02
"""Of the share that is trained; the law is exact, as every admitted group is."""


def settings() -> Settings:
    return Settings.model_validate(
        {
            "run": {"steps": STEPS},
            "sampling": {"group_size": SAMPLES, "max_new_tokens": LONGEST},
            "algorithm": {"groups_per_step": GROUPS, "max_lag": 1, "on_stale": "wait"},
            "rollout": {"max_groups": 2 * GROUPS},
            "weights": {"deadline_s": PATIENCE_S},
            "bus": {"drain_s": 0.0},
            "internal": {"claim_after_s": PATIENCE_S, "stale_wait_s": PATIENCE_S},
        }
    )


class TailEngine(ScriptedEngine):
    """Draws samples of given lengths under the version at their start, a token every ``TOKEN_S``."""

    def __init__(self, of: Settings, problems: Sequence[Problem], length_GS: "np.ndarray[Any, np.dtype[np.int64]]"):
        super().__init__(receive=weights.receiving())
        self._length_of: dict[int, int] = {}
        for group, problem in enumerate(problems):
            seeds = seeds_of(of.run.seed, problem.prompt(group, terms_of(of).sampling), range(SAMPLES))
            self._length_of |= dict(zip(seeds, length_GS[group].tolist(), strict=True))

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        started_at_s, version, length = time.time(), self.version, self._length_of[request.seed]
        await asyncio.sleep(length * TOKEN_S)
        ids, logprobs = np.ones(length, np.int32), np.full(length, -0.5, np.float32)
        sample = GeneratedSample(ids, logprobs, np.array([[0, version]], np.int32), FinishReason.STOP)
        return GeneratedGroup((sample,), started_at_s, time.time())


class OneScorer:
    name = "one"

    async def start(self) -> None:
        pass

    async def score(self, group: RolloutGroup) -> list[Score]:
        return [valued(self.name, ScoreStatus.OK, 1.0) for _ in group.samples]

    async def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def serving(bus: Bus, of: Settings, problems: Sequence[Problem], engine: TailEngine) -> AsyncIterator[None]:
    """Serve everything but the trainer."""
    ledger, stop = Ledger(bus), asyncio.Event()
    order, terms = EpochOrder(len(problems), seed=0, shuffle=False), terms_of(of)
    admission = Admission(
        bus, ledger, Dataset(tuple(problems), 0), order, lambda: terms, lambda: True, Shortage(bus, ledger)
    )
    scoring = Scoring([OneScorer()], Expression("one", ["one"]), Status())
    patience = Patience(claim_after_s=PATIENCE_S, retry_s=0.01, drain_s=0.0)
    last = functools.partial(scoring, last=True)
    reward = Worker(bus, "reward-0", ROLLOUTS, RolloutGroup, EXPERIENCE, scoring, 32, patience, last=last)
    made = replicas.context(of, bus, "rollout-0", Status())
    puller = Puller(engine.place, engine.ranks, PATIENCE_S, weights.secret)
    replica = Rollout(made, engine, CharacterCodec(), puller, replicas.own_device(made))
    leaders = [admission.run(), Promotion(bus, ledger, 4, lambda _: admission.wake()).run()]
    leading = [asyncio.create_task(loop) for loop in leaders]
    working = [asyncio.create_task(replica.run(stop, 1.0)), asyncio.create_task(reward.run(stop))]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*working)
        for task in leading:
            task.cancel()
        await asyncio.gather(*leading, return_exceptions=True)


async def trained(bus: Bus, of: Settings, folder: Path) -> list[tuple[int, int]]:
    """Make every step of the run; return group and place of each sample of which all tokens were in one."""
    ledger, steps, samples = Ledger(bus), dict[PolicyVersion, int](), list[tuple[int, int]]()
    intake, epoch = Intake(bus, Live(bus, of), steps), await ledger.take_epoch()

    async def commit(step: int, batch: Sequence[Taken]) -> None:
        version, parent = PolicyVersion(step), PolicyVersion(step - 1) if step else None
        written = write_snapshot(folder, version, step, [("w", torch.zeros(1))], torch.float32)
        record = PolicyRecord(version, parent, step, time.time(), written.digest, str(written.location))
        await ledger.commit(epoch, record, [taken.delivery for taken in batch], None)
        steps[version] = step

    await commit(0, [])
    filling = asyncio.create_task(intake.fill())
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            for step in range(of.run.steps):
                while (batch := await intake.next_batch(step, 1.0)) is None:
                    pass
                for taken in batch:
                    places = [place for place, untrained in enumerate(taken.contexts) if not untrained]
                    samples += [(int(taken.experience.group_id), place) for place in places]
                await commit(step + 1, batch)
                intake.release(batch)
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
    return samples


async def test_samples_of_every_quartile_of_length_are_trained_alike(bus: Bus, tmp_path: Path) -> None:
    of, lot = settings(), np.random.default_rng(0)
    drawn_GS = lot.integers(10, 31, (2 * STEPS * GROUPS, SAMPLES))  # more than are admitted, unless some are lost
    length_GS = np.where(lot.random(drawn_GS.shape) < 1 / 30, LONGEST, drawn_GS)
    problems = [Problem(f"row {group}", f"{group}+1=", None, "", {}) for group in range(len(length_GS))]
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    async with serving(bus, of, problems, TailEngine(of, problems, length_GS)):
        samples = await trained(bus, of, tmp_path)
        admitted_GS = length_GS[: (await ledger.status()).cursor]
    assert len(samples) == len(set(samples))
    assert admitted_GS.max() / admitted_GS.mean() > 10
    edges = np.quantile(admitted_GS, (0.25, 0.5, 0.75))
    of_trained, of_admitted = (
        np.bincount(np.searchsorted(edges, lengths), minlength=4)
        for lengths in (length_GS[tuple(np.array(samples).T)], admitted_GS.ravel())
    )
    np.testing.assert_allclose(of_trained / of_admitted, 1.0, atol=TOLERANCE)
