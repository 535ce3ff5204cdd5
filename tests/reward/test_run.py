"""A real run with the answer matcher, a format rule, a random reward model, and KL to a reference in the reward
service.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.streams import AUDIT, TRAINING_STREAMS
from tests.conftest import PATIENCE_S
from tests.support import builders, forge, reward_models
from tests.support.raw_redis import raw
from tests.support.tolerance import FORWARD

STEPS, GROUPS, GROUP_SIZE = 4, 4, 4


def flags(model: Path, folder: Path) -> list[str]:
    values = {
        **reward_models.example_flags(model),
        "run.id": "scorers",
        "run.folder": folder,
        "run.steps": STEPS,
        "algorithm.groups_per_step": GROUPS,
        "sampling.group_size": GROUP_SIZE,
        "rollout.replicas": 1,
        "trainer.warmup_steps": 0,
        "evaluation.every_steps": 1000,
        "evaluation.path": forge.FEW_PROBLEMS,
        "coordinator.sample_every_steps": 1,
    }
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("placement", ["separate", "shared"])
async def test_rules_a_reward_model_and_a_reference_work_in_one_run(placement: str, tmp_path: Path) -> None:
    model = reward_models.save_example(tmp_path / "model")
    await forge.up(
        ["config/arithmetic.toml", *flags(model, tmp_path), f"--placement.mode={placement}"], tmp_path / "up.txt"
    )
    folder = tmp_path / "scorers"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert abs(steps[0]["reference_kl"]) < 1e-6, (
        "the first step's policy is the reference: half the square of what other kernels make of a logprob"
    )
    assert all(line["reference_kl"] > 0 and line["kl_coefficient"] == 0.01 for line in steps[1:])
    assert not any("phase_reference_s" in line for line in steps), "the trainer computes no reference"
    groups = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    samples = [sample for group in groups for sample in group["completions"]]
    assert all(set(sample["scores"]) == {"answer", "format", "model"} for sample in samples)
    assert all(score["status"] != "unavailable" for sample in samples for score in sample["scores"].values())
    assert len({sample["scores"]["model"]["value"] for sample in samples}) > 1
    turns, summary = (
        sum(line.get("score_turns", 0.0) for line in steps),
        json.loads((folder / "summary.json").read_text()),
    )
    assert (turns > 0.0) == (placement == "shared")
    assert summary["score_turns"] == turns
    _compare_with_the_model_alone(model, groups)
    await _audit(folder)


def _compare_with_the_model_alone(folder: Path, groups: Sequence[dict[str, Any]]) -> None:
    classifier = reward_models.classifier(reward_models.settings(folder))
    for group in groups:
        prompt = dataclasses.replace(builders.prompt(), text=group["prompt"])
        texts = classifier.read(prompt, [sample["text"] for sample in group["completions"]])
        values = [sample["scores"]["model"]["value"] for sample in group["completions"]]
        assert classifier.compute(texts) == pytest.approx(values, rel=1e-5, abs=FORWARD)


async def _audit(folder: Path) -> None:
    with embedded.serving(folder / "valkey") as url:
        bus = await Bus.connect(url, "scorers", wait_s=PATIENCE_S)
        status, counts = await Ledger(bus).status(), await bus.counts()
        endings = [
            (int(fields[b"id"]), fields[b"outcome"].decode()) for _, fields in await raw(bus).xrange(bus.keys.of(AUDIT))
        ]
        assert (status.state, status.step) == (RunState.FINISHED, STEPS)
        assert sorted(group for group, _ in endings) == list(range(status.cursor)), "each admitted prompt ends once"
        assert Counter(outcome for _, outcome in endings) == Counter(counts)
        assert counts["trained"] == STEPS * GROUPS
        assert not any(outcome.startswith("dead") for outcome in counts)
        assert [await bus.length(stream) for stream in TRAINING_STREAMS] == [0, 0, 0, 0]
        await bus.close()
