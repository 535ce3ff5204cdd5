"""A run of the example on problems and demonstrations: each is trained once, whatever is killed, and after a resume.

A teacher's most probable tokens are learned too, of its problems only. And a run of episodes beside a teacher.
"""

import asyncio
import functools
import json
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.guess import make
from penstock.services.coordinator.data import load_data, order_of
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.streams import AUDIT
from penstock.shared.settings import load
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, left_behind, running, steps_of
from tests.conftest import PATIENCE_S
from tests.support import forge
from tests.support.raw_redis import raw

pytestmark = pytest.mark.timeout(900)

GROUPS, SAMPLES = 8, 8
EACH = 2000
"""Rows of each kind, for more steps than the run makes before it is interrupted."""
RESUMED_STEPS = 6
TAUGHT: Mapping[str, object] = {
    "reward.teachers": '[{ name = "first", model = "examples/arithmetic/policy" }]',  # what the policy was
    "algorithm.distillation": 0.1,
    "algorithm.distillation_top_k": 4,
}


def datasets(folder: Path) -> Mapping[str, object]:
    """Write half an epoch of problems and half of demonstrations; return the run's flags."""
    rows = [json.loads(line) for line in Path("examples/arithmetic/train.jsonl").read_text().splitlines()]
    shown = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows[EACH : 2 * EACH]]
    paths = {}
    for name, chosen in (("problems", rows[:EACH]), ("shown", shown)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
        paths[str(folder / f"{name}.jsonl")] = 1
    path = ", ".join(f'"{name}" = {weight}' for name, weight in paths.items())
    return {
        "data.path": f"{{ {path} }}",
        "data.shuffle": "false",
        "algorithm.imitation": 0.1,
        "algorithm.on_stale": "wait",  # a dropped sample would leave its problem untrained
        "algorithm.groups_per_step": GROUPS,
        "sampling.group_size": SAMPLES,
    }


@pytest.mark.slow
async def test_problems_and_demonstrations_are_each_trained_once_through_kills_and_a_resume(tmp_path: Path) -> None:
    async with running(tmp_path, flags={**datasets(tmp_path), **TAUGHT}) as run:
        bus = await run.connect()
        await run.more_steps(bus, 3)
        for name in ("trainer-0", "rollout-0", "reward-0"):
            await run.until(functools.partial(run.send, name, signal.SIGKILL))
        await run.more_steps(bus, 2)
        await bus.close()
        run.process.terminate()
        await asyncio.to_thread(run.process.wait, PATIENCE_S)
        steps = await steps_of(run) + RESUMED_STEPS
        await forge.up(["--resume", run.folder, f"--run.steps={steps}"], tmp_path / "resumed.txt")
        await _audit(run, steps)
        distances = [step.get("distillation_loss") for step in _steps(run.folder)]
        assert distances[0] == pytest.approx(0.0, abs=1e-6), "the first step's policy is its teacher"
        assert all(distance is not None and distance > 0 for distance in distances[1:])


@pytest.mark.slow
async def test_episodes_are_learned_beside_a_teacher_and_a_reference_in_the_reward_service(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    torch.manual_seed(0)
    tokenizer = make.build_tokenizer()
    make.build_policy(tokenizer).save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "?", "secret": {n}}}\n' for n in make.NUMBERS))
    flags = {
        "policy.model": policy, "data.path": tmp_path / "train.jsonl", "run.folder": tmp_path, "run.id": "taught",
        "run.steps": 3, "trainer.warmup_steps": 0, "algorithm.groups_per_step": 4, "sampling.group_size": 4,
        "algorithm.kl.coefficient": 0.05, "algorithm.reference": "reward",
        **TAUGHT, "reward.teachers": f'[{{ name = "first", model = "{policy}" }}]',
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    await forge.up(["examples/guess/run.toml", *words], tmp_path / "output.txt")
    first, *later = ((step["distillation_loss"], step["reference_kl"]) for step in _steps(tmp_path / "taught"))
    assert first == pytest.approx((0.0, 0.0), abs=1e-4), "the first step's policy is its teacher, and its reference"
    assert min(min(step) for step in later) > 1e-5, "how far one step moves it depends on its samples"


async def _audit(run: Run, steps: int) -> None:
    async with left_behind(run) as bus:
        status = await Ledger(bus).status()
        assert (status.state, status.step, status.cursor, status.shift) == (RunState.FINISHED, steps, steps * GROUPS, 0)
        assert await audit_groups(bus) == {"trained": steps * GROUPS}
        await audit_versions(bus)
        endings = await raw(bus).xrange(bus.keys.of(AUDIT))
    settings = load(run.folder / "settings.toml")
    train = load_data(settings).train
    order = order_of(settings, train)
    trained = {int(fields[b"id"]): int(fields[b"detail"]) for _, fields in endings}
    problems = {group_id: train.problems[order.index(group_id)] for group_id in trained}
    assert len({problem.source for problem in problems.values()}) == steps * GROUPS, "each row once"
    kinds = Counter((step, problems[group_id].demonstration is None) for group_id, step in trained.items())
    reported = _steps(run.folder)
    assert [step["step"] for step in reported] == list(range(1, steps + 1))
    for step in reported:
        assert kinds[step["step"], False] == step["demonstrations"] == GROUPS / 2, "by weight, in each step"
        assert step["samples"] == kinds[step["step"], True] * SAMPLES + GROUPS / 2
        assert step["ce_loss"] > 0
        assert "reward_mean" in step
        assert sum(step["lag_counts"].values()) == SAMPLES * GROUPS / 2, "samples of the policy only"


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
