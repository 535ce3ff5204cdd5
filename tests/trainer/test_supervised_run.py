"""Supervised runs of the example: each demonstration ends once whatever is killed, and the policy is better for it."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from shared.bus.stores.policy.ledger import Ledger, RunState
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, left_behind, running
from tests.conftest import PATIENCE_S
from tests.support import forge

pytestmark = pytest.mark.timeout(900)

STEPS, GROUPS = 30, 32


@pytest.mark.slow
async def test_demonstrations_are_trained_once_whatever_is_killed_and_rl_begins_with_the_result(tmp_path: Path) -> None:
    flags = {
        "run.steps": STEPS,
        "algorithm.groups_per_step": GROUPS,
        "trainer.checkpoint_every_steps": 7,
        "data.completion_field": "answer",
        "evaluation.every_steps": 10,
    }
    async with running(tmp_path, flags=flags, command="sft") as run:
        bus = await run.connect()
        for name in ("trainer-0", "coordinator-0", "valkey"):
            await run.more_steps(bus, 4)
            assert run.send(name, signal.SIGKILL)
        assert {row["service"] for row in run.table()["processes"]} == {"valkey", "coordinator", "trainer"}
        await bus.close()
        assert await asyncio.to_thread(run.process.wait, PATIENCE_S) == 0, run.report()
    async with left_behind(run) as bus:
        status = await Ledger(bus).status()
        assert (status.state, status.step) == (RunState.FINISHED, STEPS)
        assert (await audit_groups(bus))["trained"] == STEPS * GROUPS
        await audit_versions(bus)
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    losses = {step["step"]: step["evaluation_loss"] for step in steps if "evaluation_loss" in step}
    assert list(losses) == [1, 10, 20, 30]
    assert losses[30] <= losses[1] / 2
    assert all("reward_mean" not in step for step in steps), "demonstrations have no rewards"
    await _reinforce(tmp_path, run)


async def _reinforce(folder: Path, run: Run) -> None:
    flags = ["--run.id=rl", f"--run.folder={folder}", "--run.steps=1", "--trainer.warmup_steps=0"]
    await forge.up(["config/arithmetic.toml", "--from", run.folder, *flags], folder / "rl.txt")
    first = json.loads((folder / "rl" / "evaluations.jsonl").read_text().splitlines()[0])
    assert first["accuracy"] >= 0.60, "before: 0.352"


@pytest.mark.slow
async def test_a_supervised_run_is_rolled_back_and_its_groups_still_add_up(tmp_path: Path) -> None:
    flags = {"algorithm.groups_per_step": 8, "data.completion_field": "answer"}
    async with running(tmp_path, flags=flags, command="sft") as run:
        bus = await run.connect()
        ledger = Ledger(bus)
        await run.until(ledger.checkpoints)
        target = max(await ledger.checkpoints())
        await run.more_steps(bus, 2)
        await run.command(f"/v1/policies/{target}/rollback", {"reason": "the test"})
        await run.until(lambda: _lives(run))
        await run.more_steps(bus, 3)
        await run.stop()
        await bus.close()
    async with left_behind(run) as bus:
        counts = await audit_groups(bus)
        assert counts["undone"] >= 8
        await audit_versions(bus)


async def _lives(run: Run) -> bool:
    seen = await run.ask("GET", "/v1/operations")
    return seen is not None and any(item["state"] == "succeeded" for item in seen.json()["items"])
