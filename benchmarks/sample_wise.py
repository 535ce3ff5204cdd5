"""The sample as the unit of work against the group: scripted replicas (four), log-normal lengths, failures.

Bus, admission, promotion, rollout replicas, workers and the trainer's intake are Penstock's own; decoding is a sleep of
``token_s`` per token, scoring and training are short. Both ways get the same prompts, lengths and failures:
``groups``: one entry per group (as with ``run.deterministic = "run"``); ``samples``: one entry per sample. A share of
the samples fails once in generation, or in scoring ``--times``: with more than all attempts, they can never be scored.

    python -m benchmarks.sample_wise --steps 12 --on-stale drop
    python -m benchmarks.sample_wise --steps 12 --failures 0.05
    python -m benchmarks.sample_wise --steps 12 --failures 0.05 --fail-in scoring --times 1000
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.services.coordinator.admission.admission import Admission, terms_of
from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.admission.dataset import Dataset, EpochOrder, Problem
from penstock.services.coordinator.policies.promotion import Promotion
from penstock.services.reward.scorers.scorer import unavailable, valued
from penstock.services.reward.scoring import Scoring
from penstock.services.rollout.engines.engine import GeneratedGroup, GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.prompts import CharacterCodec
from penstock.services.rollout.engines.scripted import ScriptedEngine
from penstock.services.rollout.service import Rollout, seed_of
from penstock.services.trainer.batch.staleness import trained_lags
from penstock.services.trainer.rank0.intake import Intake, Taken
from penstock.shared.backoff import Backoff
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import (
    FinishReason,
    PolicyRecord,
    PolicyVersion,
    RolloutGroup,
    Score,
    ScoreStatus,
    StepReport,
)
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.run import records
from penstock.shared.bus.streams import AUDIT, EXPERIENCE, ROLLOUTS
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.errors import TemporaryError
from penstock.shared.expression import Expression
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import Puller
from tests.support import replicas

GROUP_SIZE, MEAN_TOKENS = 8, 100
PATIENCE = Patience(claim_after_s=30.0, retry_s=0.01, drain_s=0.0)


class Work:
    """Lengths and failures of every sample, the same for both ways, and what they cost."""

    def __init__(self, arguments: argparse.Namespace, run: Settings) -> None:
        groups, token_s = 3 * arguments.steps * arguments.groups_per_step, arguments.token_s
        lot = np.random.default_rng(0)
        sigma = arguments.sigma
        lengths = lot.lognormal(np.log(MEAN_TOKENS) - sigma**2 / 2, sigma, (groups, GROUP_SIZE))
        self.length_GS = np.maximum(1, lengths.round().astype(np.int64))
        failing = (lot.random(lengths.shape) < arguments.failures) * arguments.times
        unscored, idle = arguments.fail_in == "scoring", np.zeros_like(failing)
        self.fails_GS, self.unscored_GS = (idle, failing) if unscored else (failing, idle)
        """How often each sample still fails in generation, and in scoring."""
        self.token_s = token_s
        self.generated = self.wasted = 0
        self.problems = tuple(Problem(f"row {group}", f"{group}+1=", None, "", {}) for group in range(groups))
        self._samples_of: dict[int, list[tuple[int, int]]] = {}
        for group, problem in enumerate(self.problems):
            prompt, samples = problem.prompt(group, terms_of(run).sampling), [(group, s) for s in range(GROUP_SIZE)]
            self._samples_of[seed_of(0, prompt)] = samples
            for sample in samples:
                self._samples_of[seed_of(0, dataclasses.replace(prompt, sample=sample[1]))] = [sample]

    async def decode(self, request: GenerationRequest) -> list[tuple[int, int]]:
        """Return the group and index of a request's samples, after the longest. Raises TemporaryError if one fails."""
        samples = self._samples_of[request.seed]
        lengths = [int(self.length_GS[sample]) for sample in samples]
        await asyncio.sleep(max(lengths) * self.token_s)
        failed = [sample for sample in samples if self.fails_GS[sample]]
        self.generated += sum(lengths)
        if failed:
            self.wasted += sum(lengths)
            for sample in failed:
                self.fails_GS[sample] -= 1
            raise TemporaryError("this sample fails")
        return samples


class PacedEngine(ScriptedEngine):
    """Takes ``token_s`` per token, with any number of samples beside it up to the replica's room."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        """Return samples of the drawn lengths, under the version at the start."""
        started_at_s, version = time.time(), self.version
        samples = await self._work.decode(request)
        made = [_sample(sample[1], int(self._work.length_GS[sample]), version or 0) for sample in samples]
        return GeneratedGroup(tuple(made), started_at_s, time.time())


def _sample(place: int, length: int, version: int) -> GeneratedSample:
    ids, logprobs = np.full(length, place + 1, np.int32), np.full(length, -0.5, np.float32)
    return GeneratedSample(ids, logprobs, np.array([[0, version]], np.int32), FinishReason.STOP)


class PlaceScorer:
    """A reward of 1 for each sample, unless it fails. Its tokens are its place in the group, plus 1."""

    name = "place"

    def __init__(self, work: Work) -> None:
        self._work = work

    async def start(self) -> None:
        """Do nothing."""

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Return the scores."""
        scores, left = [], self._work.unscored_GS[group.group_id]
        for sample in group.samples:
            place = int(sample.token_ids[0]) - 1
            scores.append(unavailable(self.name, "fails") if left[place] else valued(self.name, ScoreStatus.OK, 1.0))
            left[place] = max(0, left[place] - 1)
        return scores

    async def close(self) -> None:
        """Do nothing."""


class Trainer:
    """Commits batches of the intake as versions; a step takes ``step_s``."""

    def __init__(self, bus: Bus, run: Settings, folder: Path, step_s: float) -> None:
        self._bus, self._ledger, self._settings = bus, Ledger(bus), run
        self._folder, self._step_s = folder, step_s
        self._steps: dict[PolicyVersion, int] = {}
        self._intake = Intake(bus, Live(bus, run), self._steps)
        self.trained: list[int] = []
        self.trained_tokens = 0
        self.lags: collections.Counter[int] = collections.Counter()
        self.finished_s: list[float] = []

    async def run(self) -> None:
        """Train every step of the run."""
        self._epoch = await self._ledger.take_epoch()
        await self._commit(0, [])
        filling = asyncio.create_task(self._intake.fill())
        for step in range(self._settings.run.steps):
            while (batch := await self._intake.next_batch(step, 1.0)) is None:
                pass
            await asyncio.sleep(self._step_s)
            self.lags.update(max(trained_lags(t.experience.group, step, self._steps, t.contexts)) for t in batch)
            self.trained += [int(taken.experience.group_id) for taken in batch]
            for taken in batch:
                lengths = [len(sample.token_ids) for sample in taken.experience.group.samples]
                self.trained_tokens += sum(lengths) - sum(taken.contexts)
            await self._commit(step + 1, batch)
            self._intake.release(batch)
            self.finished_s.append(time.monotonic())
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)

    async def _commit(self, step: int, batch: Sequence[Taken]) -> None:
        version, parent = PolicyVersion(step), PolicyVersion(step - 1) if step else None
        written = write_snapshot(self._folder, version, step, [("w", torch.zeros(1))], torch.float32)
        record = PolicyRecord(version, parent, step, time.time(), written.digest, str(written.location))
        report = StepReport(step, version, time.time(), len(batch), {}, {}) if batch else None
        await self._ledger.commit(self._epoch, record, [taken.delivery for taken in batch], report)
        self._steps[version] = step


def settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of both runs."""
    algorithm = {"groups_per_step": arguments.groups_per_step, "max_lag": arguments.max_lag}
    return Settings.model_validate(
        {
            "run": {"steps": arguments.steps},
            "sampling": {"group_size": GROUP_SIZE},
            "algorithm": {**algorithm, "on_stale": arguments.on_stale},
        }
    )


def replica(bus: Bus, work: Work, number: int, run: Settings, arguments: argparse.Namespace, *, whole: bool) -> Rollout:
    """Return a replica with room for ``arguments.max_groups`` groups."""
    engine, tables = PacedEngine(work), run.model_dump()
    tables["rollout"]["max_groups"], tables["weights"]["deadline_s"] = arguments.max_groups, 5.0
    tables["bus"]["drain_s"] = 0.0
    of = Settings.model_validate(tables)
    if whole:  # but not the rest of what such a run needs
        of = of.model_copy(update={"run": of.run.model_copy(update={"deterministic": "run"})})
    made = replicas.context(of, bus, f"rollout-{number}", Status())
    puller = Puller(engine.place, engine.ranks, 5.0, lambda: b"secret")
    return Rollout(made, engine, CharacterCodec(), puller, replicas.own_device(made))


@contextlib.asynccontextmanager
async def serving(
    bus: Bus, run: Settings, work: Work, arguments: argparse.Namespace, *, whole: bool
) -> AsyncIterator[None]:
    """Serve everything but the trainer."""
    ledger, stop = Ledger(bus), asyncio.Event()
    dataset, order = Dataset(work.problems, 0), EpochOrder(len(work.problems), seed=0, shuffle=False)
    terms = dataclasses.replace(terms_of(run), whole=whole)
    admission = Admission(bus, ledger, dataset, order, lambda: terms, lambda: True, Shortage(bus, ledger))
    scoring = Scoring([PlaceScorer(work)], Expression("place", ["place"]), Status(), redo=Backoff(0.01, 0.01))
    last = functools.partial(scoring, last=True)
    reward = Worker(bus, "reward-0", ROLLOUTS, RolloutGroup, EXPERIENCE, scoring, 32, PATIENCE, last=last)
    served = [replica(bus, work, number, run, arguments, whole=whole) for number in range(arguments.replicas)]
    leading = [admission.run(), Promotion(bus, ledger, 4, lambda version: admission.wake()).run()]
    leaders = [asyncio.create_task(loop) for loop in leading]
    workers = [asyncio.create_task(each.run(stop, 1.0)) for each in served]
    workers.append(asyncio.create_task(reward.run(stop)))
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*workers)
        for task in leaders:
            task.cancel()
        await asyncio.gather(*leaders, return_exceptions=True)


async def measure(arguments: argparse.Namespace, *, whole: bool) -> dict[str, Any]:
    """Run one way to its end."""
    run = settings(arguments)
    work = Work(arguments, run)
    with tempfile.TemporaryDirectory(prefix="sample-wise-") as scratch, embedded.serving(Path(scratch) / "bus") as url:
        bus = await Bus.connect(url, "sample-wise", wait_s=30.0)
        try:
            ledger, trainer = Ledger(bus), Trainer(bus, run, Path(scratch), arguments.step_s)
            await ledger.create()
            await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
            async with serving(bus, run, work, arguments, whole=whole):
                await trainer.run()
                status, counts = await ledger.account()
            for _, fields in await records.page(bus, AUDIT, None, len(work.length_GS)):
                if fields[b"outcome"] != b"trained":
                    work.wasted += int(work.length_GS[int(fields[b"id"])].sum())
        finally:
            await bus.close()
    work.wasted += int(work.length_GS[trainer.trained].sum()) - trainer.trained_tokens
    return figures(arguments, work, trainer, status.cursor, counts)


def figures(
    arguments: argparse.Namespace, work: Work, trainer: Trainer, admitted: int, counts: dict[str, int]
) -> dict[str, Any]:
    """Return what one run cost and gave; rates from the first step's end on."""
    seconds = trainer.finished_s[-1] - trainer.finished_s[0]
    steps = len(trainer.finished_s) - 1
    return {
        "samples_per_s": round(steps * arguments.groups_per_step * GROUP_SIZE / seconds, 1),
        "step_s": round(seconds / steps, 3),
        "busy_share": round(_busy(arguments, work, seconds), 3),
        "lags": {str(lag): groups for lag, groups in sorted(trainer.lags.items())},
        "trained_vs_admitted_by_quartile": _quartiles(work, trainer.trained, admitted),
        "longest_to_mean": round(float(work.length_GS[:admitted].max() / work.length_GS[:admitted].mean()), 2),
        "wasted_tokens_share": round(work.wasted / work.generated, 4),
        "admitted": admitted,
        "endings": dict(sorted(counts.items())),
    }


def _busy(arguments: argparse.Namespace, work: Work, seconds: float) -> float:
    """Return the share of the replicas' room that decoded, as if all tokens were decoded since the first step's end."""
    room = arguments.replicas * arguments.max_groups * GROUP_SIZE
    return float(work.generated * work.token_s / (room * seconds))


def _quartiles(work: Work, trained: Sequence[int], admitted: int) -> list[float]:
    """Return, by quartile of length, the share of admitted samples that were trained, relative to all of them."""
    lengths = work.length_GS[:admitted]
    quartile_GS = np.searchsorted(np.quantile(lengths, (0.25, 0.5, 0.75)), lengths)
    of_trained = np.bincount(quartile_GS[trained].ravel(), minlength=4) / len(trained)
    of_admitted = np.bincount(quartile_GS.ravel(), minlength=4) / admitted
    return [round(float(ratio), 4) for ratio in of_trained / of_admitted]


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both ways, one after the other."""
    groups, samples = await measure(arguments, whole=True), await measure(arguments, whole=False)
    return {
        "benchmark": "sample_wise",
        "cpus": os.cpu_count(),
        **vars(arguments),
        "speedup": round(samples["samples_per_s"] / groups["samples_per_s"], 3),
        "groups": groups,
        "samples": samples,
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups-per-step", type=int, default=16)
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--max-groups", type=int, default=2, help="groups whose samples one replica has room for")
    parser.add_argument("--sigma", type=float, default=0.7, help="of the lengths' logarithms; 0: equal lengths")
    parser.add_argument("--on-stale", default="wait")
    parser.add_argument("--failures", type=float, default=0.0, help="share of samples that fail")
    parser.add_argument("--fail-in", choices=("generation", "scoring"), default="generation")
    parser.add_argument("--times", type=int, default=1, help="how often they fail")
    parser.add_argument("--token-s", type=float, default=0.005)
    parser.add_argument("--step-s", type=float, default=0.2)
    logging.basicConfig(level=logging.ERROR)
    print(json.dumps(asyncio.run(compare(parser.parse_args()))))


if __name__ == "__main__":
    main()
