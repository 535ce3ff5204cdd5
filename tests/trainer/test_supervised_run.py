"""Supervised runs of the example: each row ends once whatever is killed, and the policy is better for it."""

import asyncio
import functools
import json
import math
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock.services.cli.reports import memory
from penstock.services.coordinator.records.jsonl import read
from penstock.services.coordinator.records.memory import MEMORY_FILE
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.settings import load_run
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import ROOT, Run, left_behind, running, steps_of
from tests.conftest import PATIENCE_S
from tests.support import forge
from tests.support.tolerance import FORWARD

pytestmark = pytest.mark.timeout(900)

GROUPS = 32
LEAST_STEPS, EVALUATED_EVERY = 30, 10
PROBLEMS = 500
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
Problem = Mapping[str, str]
OWN: Mapping[str, object] = {
    "algorithm.groups_per_step": GROUPS,
    "trainer.checkpoint_every_steps": 7,
    "evaluation.every_steps": EVALUATED_EVERY,
    "evaluation.path": ROOT / "examples" / "arithmetic" / "heldout.jsonl",
}


@pytest.mark.slow
async def test_demonstrations_are_trained_once_whatever_is_killed_and_rl_begins_with_the_result(tmp_path: Path) -> None:
    run, steps = await _through_kills(tmp_path, {"data.completion_field": "answer"})
    _assert_learned(steps)
    await _reinforce(tmp_path, run)


@pytest.mark.slow
async def test_demonstrations_of_two_turns_are_learned(tmp_path: Path) -> None:
    """Half of the tokens after the prompt are given, and no policy foretells them. Pairs of two turns are killed below."""
    flags = {
        **OWN,
        **_in_turns(tmp_path, _demonstration),
        "run.steps": LEAST_STEPS,
        "run.folder": tmp_path,
        "run.id": "sft",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    await forge.up(["config/arithmetic.toml", *words], tmp_path / "output.txt", "sft")
    _assert_learned(_steps(tmp_path / "sft", LEAST_STEPS))


def _assert_learned(steps: list[dict[str, float]]) -> None:
    losses = {step["step"]: step["evaluation_loss"] for step in steps if "evaluation_loss" in step}
    assert list(losses) == _evaluated(steps)
    assert losses[len(steps)] <= losses[1] / 2
    assert all("reward_mean" not in step for step in steps), "demonstrations have no rewards"


@pytest.mark.slow
async def test_preference_pairs_are_trained_once_whatever_is_killed_and_held_out_ones_are_ordered(
    tmp_path: Path,
) -> None:
    """Of one and of two turns."""
    flags = {"data.completion_field": "chosen", "data.rejected_field": "rejected", "algorithm.dpo_beta": 0.5}
    run, steps = await _through_kills(tmp_path, {**flags, **_in_turns(tmp_path, _pair)})
    _assert_planned(run.folder)
    losses, ordered = (
        {step["step"]: step[name] for step in steps if name in step}
        for name in ("evaluation_loss", "evaluation_accuracy")
    )
    assert list(losses) == list(ordered) == _evaluated(steps)
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=FORWARD), "at first, the policy is the reference"
    assert losses[len(steps)] <= losses[1] / 2
    assert ordered[len(steps)] >= ordered[1]
    assert ordered[len(steps)] >= 0.85, "at first 0.75, of which half have two turns"
    assert steps[-1]["preference_margin"] > 1.0 > abs(steps[0]["preference_margin"])
    assert all("reward_mean" not in step for step in steps), "what makes a pair is no score"


def _assert_planned(folder: Path) -> None:
    """The tensors of the trainer are those of `penstock plan --memory`, but for norms."""
    (measured,) = [phase for phase in memory.phases(read(folder / MEMORY_FILE)) if phase.phase == "optimizer"]
    planned = memory.predicted(load_run(folder), measured)
    names = ("weights", "gradients", "master weights", "moments", "reference")
    assert [planned[name] for name in names] == pytest.approx([measured.components[name] for name in names], rel=0.01)
    assert "snapshots" not in planned.keys() | measured.components.keys(), "no replica asks for weights"


def _evaluated(steps: list[dict[str, float]]) -> list[int]:
    return [1, *range(EVALUATED_EVERY, len(steps) + 1, EVALUATED_EVERY)]


def _in_turns(folder: Path, row_of: Callable[[list[Problem]], Mapping[str, object]]) -> dict[str, object]:
    """Write the example's problems as rows of one and of two turns, and its policy with a template; return the flags."""
    example, flags = ROOT / "examples" / "arithmetic", dict[str, object]()
    for table, name in (("data", "train"), ("evaluation", "heldout")):
        lines = (example / f"{name}.jsonl").read_text().splitlines()
        problems = [json.loads(line) for line in lines[:PROBLEMS]]  # every start renders all rows
        rows = [row_of(problems[n : n + 1 + n % 2]) for n in range(len(problems) - 1)]
        flags[f"{table}.path"] = folder / f"{name}.jsonl"
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(example / "policy", folder / "policy")
    (folder / "policy" / "chat_template.jinja").write_text(TEMPLATE)
    return {**flags, "policy.model": folder / "policy"}


def _demonstration(problems: list[Problem]) -> dict[str, object]:
    return {"messages": _conversation(problems, 0)}


def _pair(problems: list[Problem]) -> dict[str, object]:
    """The problems with their answers, and with ones that are ten off."""
    return {"chosen": _conversation(problems, 0), "rejected": _conversation(problems, 10)}


def _conversation(problems: list[Problem], off: int) -> list[Mapping[str, str]]:
    return [
        {"role": role, "content": content}
        for problem in problems
        for role, content in (("user", problem["prompt"]), ("assistant", str(abs(int(problem["answer"]) - off))))
    ]


async def _through_kills(folder: Path, flags: dict[str, object]) -> tuple[Run, list[dict[str, float]]]:
    """Return a supervised run, in which every process was killed, and its steps, after the audit of its groups.

    The run is resumed for its last steps: until then it has no end that it might reach between two kills.
    """
    async with running(folder, flags={**OWN, **flags}, command="sft") as run:
        bus = await run.connect()
        for name in ("trainer-0", "coordinator-0", "valkey"):
            await run.more_steps(bus, 4)
            await run.until(functools.partial(run.send, name, signal.SIGKILL))
        await run.more_steps(bus, 1)
        assert {row["service"] for row in run.table()["processes"]} == {"valkey", "coordinator", "trainer"}
        await bus.close()
        run.process.terminate()
        await asyncio.to_thread(run.process.wait, PATIENCE_S)
        last = max(LEAST_STEPS, EVALUATED_EVERY * math.ceil((await steps_of(run) + 1) / EVALUATED_EVERY))
        await forge.up(["--resume", run.folder, f"--run.steps={last}"], folder / "resumed.txt")
    async with left_behind(run) as bus:
        status = await Ledger(bus).status()
        assert (status.state, status.step) == (RunState.FINISHED, last)
        assert (await audit_groups(bus))["trained"] == last * GROUPS
        await audit_versions(bus)
    return run, _steps(run.folder, last)


def _steps(folder: Path, last: int) -> list[dict[str, float]]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, last + 1))
    return steps


async def _reinforce(folder: Path, run: Run) -> None:
    flags = ["--run.id=rl", f"--run.folder={folder}", "--run.steps=1", "--trainer.warmup_steps=0"]
    await forge.up(["config/arithmetic.toml", "--from", run.folder, *flags], folder / "rl.txt")
    first = json.loads((folder / "rl" / "evaluations.jsonl").read_text().splitlines()[0])
    assert first["accuracy"] >= 0.60, "before: 0.352"


@pytest.mark.slow
async def test_a_supervised_run_is_rolled_back_and_its_groups_still_add_up(tmp_path: Path) -> None:
    flags = {
        "algorithm.groups_per_step": 8,
        "data.completion_field": "answer",
        "trainer.keep_last": 10_000,  # the target is kept, however many steps are made before the command
    }
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
    return seen is not None and seen.is_success and any(item["state"] == "succeeded" for item in seen.json()["items"])
