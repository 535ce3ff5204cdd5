"""A ruinous live learning rate makes the gate roll a real run back."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.services.coordinator.evaluation.results import Evaluation, Evaluations
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.settings import load
from tests.conftest import PATIENCE_S, until
from tests.support import forge

FLAGS = {
    "run.steps": 100_000,
    "sampling.group_size": 4,
    "algorithm.groups_per_step": 8,
    "trainer.checkpoint_every_steps": 5,
    "trainer.keep_last": 10,
    "rollout.replicas": 1,
    "evaluation.every_steps": 5,
    "evaluation.problems": 200,
    "evaluation.gate.action": "rollback",
    "guards.off": '["no_signal", "kl", "entropy"]',
    "guards.pause": "[]",
}


@contextlib.asynccontextmanager
async def run(folder: Path) -> AsyncIterator[forge.Started]:
    flags = [f"--{name}={value}" for name, value in {**FLAGS, "run.id": "gate", "run.folder": folder}.items()]
    with (folder / "up.txt").open("wb") as output:
        process = forge.start("penstock.services.cli", ["up", "config/arithmetic.toml", *flags], output)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, PATIENCE_S)
        process.kill()


async def _of(bus: Bus, gate: str) -> list[Evaluation]:
    return [evaluation for evaluation in await Evaluations(bus).read() if evaluation.gate == gate]


@pytest.mark.slow
async def test_a_policy_that_was_ruined_is_revoked_and_the_run_goes_on_from_a_good_one(tmp_path: Path) -> None:
    table = tmp_path / "gate" / "up.json"
    async with run(tmp_path) as process:
        await until(lambda: process.poll() is not None or (table.exists() and "bus" in json.loads(table.read_text())))
        bus = await Bus.connect(str(json.loads(table.read_text())["bus"]), "gate", wait_s=PATIENCE_S)
        live = Live(bus, load(tmp_path / "gate" / "settings.toml"))

        async def passed_after(step: int) -> bool:
            return any(evaluation.step > step for evaluation in await _of(bus, "passed"))

        await until(lambda: passed_after(0))
        await live.change(0, {"trainer.learning_rate": 1.0}, "a slip of the finger")
        await until(lambda: _fell(bus))
        fell = (await _of(bus, "fell"))[0]
        await until(lambda: _revoked(bus, fell))
        await live.change(1, {"trainer.learning_rate": 1e-5}, "put right")
        await until(lambda: passed_after(fell.step))
        best = max(await _of(bus, "passed"), key=lambda evaluation: evaluation.version)
        assert best.version > fell.version
        assert (best.accuracy or 0) - (fell.accuracy or 0) > 0.1
        await bus.close()


async def _fell(bus: Bus) -> bool:
    return bool(await _of(bus, "fell"))


async def _revoked(bus: Bus, fell: Evaluation) -> bool:
    return (await Ledger(bus).policy_states()).get(fell.version) is PolicyState.REVOKED
