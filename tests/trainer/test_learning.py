"""Learning comes from the rewards and the learning rate alone.

Runs of the example: unchanged, with learning rate 0, with random rewards. Measured is the probability of right
held-out answers; greedy accuracy would be too sensitive, as the example starts undecided.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.support import forge

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "examples" / "arithmetic" / "policy"
HELD_OUT = ROOT / "examples" / "arithmetic" / "heldout.jsonl"
EVALUATED = 250
"""Half of the held-out problems."""
ALONE = "--rollout.replicas=1"
LOT = '--reward.scorers=[{kind = "random", name = "answer"}]'


async def run(folder: Path, run_id: str, *flags: str) -> Path:
    """Run 15 steps; return the run's folder."""
    (folder / "heldout.jsonl").write_text("".join(HELD_OUT.read_text().splitlines(keepends=True)[:EVALUATED]))
    words = ["config/arithmetic.toml", "--run.steps=15", f"--run.id={run_id}", f"--run.folder={folder}"]
    words.append(f"--evaluation.path={folder / 'heldout.jsonl'}")
    await forge.up([*words, "--evaluation.every_steps=1000", *flags], folder / "up.txt")
    return folder / run_id


def probability_of_answers(policy: Path) -> float:
    """Return the mean probability of a right answer at temperature 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    of_lengths: dict[tuple[int, int], list[list[int]]] = {}
    for row in rows:
        prompt, answer = tokenizer(row["prompt"])["input_ids"], tokenizer(row["answer"])["input_ids"]
        tokens = [*prompt, *answer, tokenizer.eos_token_id]
        of_lengths.setdefault((len(prompt), len(tokens)), []).append(tokens)
    total = 0.0
    for (begin, _), together in of_lengths.items():
        tokens_BT = torch.tensor(together)
        with torch.no_grad():
            logprobs_BTV = torch.log_softmax(model(input_ids=tokens_BT).logits[:, begin - 1 : -1], -1)
        total += float(logprobs_BTV.gather(-1, tokens_BT[:, begin:, None]).sum((1, 2)).exp().sum())
    return total / len(rows)


@pytest.mark.slow
async def test_the_example_learns(tmp_path: Path) -> None:
    folder = await run(tmp_path, "real")
    accuracies = [json.loads(line)["accuracy"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert accuracies[0] <= 0.40
    assert accuracies[-1] >= 0.65
    assert probability_of_answers(POLICY) <= 0.50
    assert probability_of_answers(folder / "policy") >= 0.60


@pytest.mark.slow
async def test_an_actor_and_a_critic_learn(tmp_path: Path) -> None:
    flags = ("--algorithm.preset=ppo", "--algorithm.critic.learning_rate=1e-3")
    assert_learned(await run(tmp_path, "preset", ALONE, *flags))


@pytest.mark.slow
async def test_dpo_learns_on_a_device_that_trainer_and_replica_share(tmp_path: Path) -> None:
    flags = ("--algorithm.preset=dpo", "--algorithm.clip=[0.2, 0.2]", "--placement.mode=shared", "--placement.rung=4")
    folder = await run(tmp_path, "shared", ALONE, *flags)
    assert_learned(folder)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 15
    assert {step["switch_rung"] for step in steps if "switch_rung" in step} == {4.0}
    assert max(step["switch_moved_bytes"] for step in steps) > (POLICY / "model.safetensors").stat().st_size
    # With max_lag = 1, a turn generates two batches at most, and the trainer keeps the device between those.
    assert sum(step.get("phase_reload_s", 0.0) > 0.0 for step in steps) >= 7


def assert_learned(folder: Path) -> None:
    accuracies = [json.loads(line)["accuracy"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert accuracies[0] <= 0.40
    assert accuracies[-1] >= 0.60


@pytest.mark.slow
async def test_a_learning_rate_of_zero_changes_nothing(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = await run(
        tmp_path, "still", ALONE, "--run.steps=4", "--trainer.learning_rate=0", "--trainer.warmup_steps=0"
    )
    before, after = load_file(POLICY / "model.safetensors"), load_file(folder / "policy" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before.keys() | after.keys())
    accuracies = [json.loads(line)["accuracy"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert max(accuracies) - min(accuracies) <= 1 / EVALUATED, "but for a tie between two tokens"


@pytest.mark.slow
async def test_rewards_by_lot_teach_nothing(tmp_path: Path) -> None:
    folder = await run(tmp_path, "lot", ALONE, LOT, f"--evaluation.path={forge.FEW_PROBLEMS}")
    assert probability_of_answers(folder / "policy") <= probability_of_answers(POLICY) + 0.10
