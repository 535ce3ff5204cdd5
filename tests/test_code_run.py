"""Code, end to end: a run writes programs, they run isolated, the policy trains on the verdicts; and its executor is killed.

The executor is frozen first, so that what is killed certainly holds jobs. The audit is read from what Valkey left on disk.
"""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from shared.ledger import Ledger
from shared.streams import ROLLOUTS
from tests.conftest import need, until
from tests.test_chaos import ROOT, Chaos, audit_groups, connect, left_behind, running

STEPS, GROUPS = 6, 4
FLAGS = {
    "run.id": "code",
    "run.steps": STEPS,
    "sampling.group_size": 4,
    "algorithm.groups_per_step": GROUPS,
    "trainer.warmup_steps": 1,
    "coordinator.sample_every_steps": 1,
    "evaluation.every_steps": 1000,
    "bus.drain_s": 5,
}
TIERS = ("namespace: ", "landlock: ")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_run_on_code_goes_on_when_its_executor_is_killed_and_every_program_ran_in_a_named_tier(
    tmp_path: Path,
) -> None:
    need("bwrap", "bubblewrap")
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join((ROOT / "examples/code/heldout.jsonl").read_text().splitlines(keepends=True)[:4]))
    async with running(tmp_path, "config/code.toml", {**FLAGS, "evaluation.path": heldout}) as chaos:
        bus = await connect(chaos)
        await _kill_executor(chaos, Ledger(bus), lambda: bus.length(ROLLOUTS))
        await bus.close()
        assert await asyncio.to_thread(chaos.process.wait, 200) == 0, chaos.output.read_text()
    async with left_behind(chaos.folder) as bus:
        await audit_groups(bus, STEPS, GROUPS)
    evaluations = [json.loads(line) for line in (chaos.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [found["step"] for found in evaluations] == [0, STEPS]
    groups = [json.loads(line) for line in (chaos.folder / "rollouts.jsonl").read_text().splitlines()]
    scores = [completion["scores"]["code"] for group in groups for completion in group["completions"]]
    assert len(scores) >= 4
    assert all(score["status"] == "wrong_format" or score["detail"].startswith(TIERS) for score in scores)
    assert any(score["detail"].startswith(TIERS) for score in scores)
    assert all(score["value"] is not None for score in scores)


async def _kill_executor(chaos: Chaos, ledger: Ledger, backlog: object) -> None:
    """Freeze the executor after a step, wait until groups wait for it, kill it; return when there is another."""

    async def stepped() -> bool:
        chaos.check()
        return (await ledger.status()).step >= 1

    await until(stepped, timeout_s=120.0)
    pid = chaos.pid("executor")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    async def waiting() -> bool:
        chaos.check()
        return int(await backlog()) >= 2  # type: ignore[operator]

    await until(waiting, timeout_s=60.0)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: chaos.pid("executor") not in (pid, None), timeout_s=60.0)
