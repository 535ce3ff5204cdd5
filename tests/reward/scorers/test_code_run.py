"""A run that trains on code verdicts, while its executor is killed.

The executor is frozen first, so that it certainly holds jobs. The audit reads what Valkey left on disk.
"""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from penstock.services.coordinator.evaluation.results import Evaluations
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.streams import ROLLOUTS
from tests.chaos.audit import audit_groups
from tests.chaos.run import ROOT, Run, left_behind, running
from tests.conftest import PATIENCE_S, need, until

STEPS, GROUPS = 6, 4
FLAGS = {
    "run.steps": STEPS,
    "sampling.group_size": 4,
    "algorithm.groups_per_step": GROUPS,
    "trainer.warmup_steps": 1,
    "coordinator.sample_every_steps": 1,
    "evaluation.every_steps": 1000,
    "coordinator.autostart": "false",
}
TIERS = ("namespace: ", "landlock: ")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_on_code_goes_on_when_its_executor_is_killed_and_every_program_ran_in_a_named_tier(
    tmp_path: Path,
) -> None:
    need("bwrap", "bubblewrap")
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join((ROOT / "examples/code/heldout.jsonl").read_text().splitlines(keepends=True)[:4]))
    flags = {**FLAGS, "evaluation.path": heldout}
    async with running(tmp_path, flags=flags, config="config/code.toml") as run:
        bus = await run.connect()
        await _kill_executor(run, bus)
        await bus.close()
        assert await asyncio.to_thread(run.process.wait, PATIENCE_S) == 0, run.report()
    async with left_behind(run) as bus:
        status = await Ledger(bus).status()
        assert (status.state, status.step) == (RunState.FINISHED, STEPS)
        assert (await audit_groups(bus))["trained"] == STEPS * GROUPS
    evaluations = [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [evaluation["step"] for evaluation in evaluations] == [0, STEPS]
    groups = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    scores = [completion["scores"]["code"] for group in groups for completion in group["completions"]]
    assert len(scores) >= 4
    assert all(score["status"] == "wrong_format" or score["detail"].startswith(TIERS) for score in scores)
    assert any(score["detail"].startswith(TIERS) for score in scores)
    assert all(score["value"] is not None for score in scores)


async def _kill_executor(run: Run, bus: Bus) -> None:
    """Freeze the executor before the first step, kill it when groups wait for it; return when there is another."""

    async def is_evaluated() -> bool:
        run.check()
        return bool(await Evaluations(bus).read())

    await until(is_evaluated)
    pid = run.pid("executor")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await Ledger(bus).transition(RunState.RUNNING, "the executor is frozen", [RunState.CREATED])

    async def waiting() -> bool:
        run.check()
        return await bus.length(ROLLOUTS) >= 2

    await until(waiting)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: run.pid("executor") not in (pid, None))
