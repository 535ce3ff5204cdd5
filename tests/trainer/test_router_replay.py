"""The trainer process with routes on a shelf: fetched, partly lost, and replayed after a kill from its own copies."""

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.claims import Claim
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Sample, StepReport
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.bus.streams import EXPERIENCE, STEPS
from penstock.shared.shelf.shelf import Shelf
from tests.conftest import PATIENCE_S, Server
from tests.support.shelves import LIMITS, served
from tests.trainer.test_expert_parallel import made, run_of
from tests.trainer.test_service import GROUPS, Run, bus_of, experience

LAYERS, EXPERTS, TOP = 2, 4, 2


async def feed(bus: Bus, shelf: Shelf, start: int, count: int) -> None:
    """Append groups whose samples have random routes; of each third group the first sample's are lost."""
    for number in range(start, start + count):
        generator, whole = np.random.default_rng(number), experience(number)
        samples: list[Sample] = []
        for sample in whole.group.samples:
            positions = len(whole.group.prompt_token_ids) + len(sample.token_ids) - 1
            routes = generator.random((positions, LAYERS, EXPERTS)).argsort(-1)[..., :TOP].astype(np.uint8)
            claim = await shelf.put(routes.tobytes(), number)
            assert isinstance(claim, Claim)
            if not samples and number % 3 == 0:
                claim = dataclasses.replace(claim, digest="0" * 64)
            samples.append(dataclasses.replace(sample, routes=wire.encode(claim)))
        group = dataclasses.replace(whole.group, samples=tuple(samples))
        await bus.append(EXPERIENCE, {"id": str(number), "data": wire.encode(dataclasses.replace(whole, group=group))})


async def reports(bus: Bus) -> list[StepReport]:
    return [report for _, report in await bus.newest(STEPS, StepReport, 10)][::-1]


async def trained(run: Run, folder: Path, *, kill: bool) -> tuple[dict[str, torch.Tensor], list[StepReport]]:
    """Return the weights after three steps; ``kill``: in between, when the replica that had the routes is gone."""
    async with bus_of(run) as (bus, ledger):
        secret = RunSecret(bus)
        await secret.refresh()
        limits = dataclasses.replace(LIMITS, copies=1)
        async with served(bus, folder, "rollout-0", limits, secret=secret) as shelf:
            async with run.trainer() as process:
                await feed(bus, shelf, 0, 2 * GROUPS)
                await run.reaches(ledger, 2, process)
                if kill:
                    shelf.drop(shelf._store.names)
                    os.killpg(process.pid, signal.SIGKILL)
                    await asyncio.to_thread(process.wait, PATIENCE_S)
                else:
                    await feed(bus, shelf, 2 * GROUPS, GROUPS)
                    await run.reaches(ledger, 3, process)
            if kill:
                async with run.trainer() as process:
                    await feed(bus, shelf, 2 * GROUPS, GROUPS)
                    await run.reaches(ledger, 3, process)
        assert "replay differs" not in run.log.read_text()
        return await run.weights(ledger), await reports(bus)


@pytest.mark.slow
@pytest.mark.timeout(480)
async def test_routes_reach_the_ranks_and_outlive_their_replica_and_the_trainer(tmp_path: Path, server: Server) -> None:
    model = made(tmp_path / "model")
    options = {"ranks": 2, "router_replay": "true", "checkpoint_every_steps": 100}
    whole, killed, live = (
        run_of(model, server, name, **of)
        for name, of in (("whole", options), ("killed", options), ("live", {**options, "router_replay": "false"}))
    )
    for run in (whole, killed, live):
        run.config.write_text(f'{run.config.read_text()}[rollout]\nengine = "transformers"\n')
    expected, steps = await trained(whole, tmp_path / "whole-shelf", kill=False)
    assert [report.metrics["routed_live"] for report in steps] == [1, 1, 0], "those of groups 0 and 3 are lost"
    assert all(0.6 < report.metrics["replayed_fraction"] <= 1 for report in steps)
    actual, _ = await trained(killed, tmp_path / "killed-shelf", kill=True)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    other, plain = await trained(live, tmp_path / "live-shelf", kill=False)
    assert not all(torch.equal(other[name], tensor) for name, tensor in expected.items())
    assert "replayed_fraction" not in plain[0].metrics
