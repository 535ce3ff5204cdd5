"""Learning is honest: it comes from the rewards and from the learning rate, and from nothing else.

Three short whole runs of the example: as it is, with a learning rate of 0, and with rewards drawn by lot.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOT = 'reward.scorers=[{kind = "random", name = "answer"}]'
PROBLEMS = 500


async def run(folder: Path, run_id: str, *flags: str) -> tuple[float, float]:
    """Run 25 steps; return the accuracy on all held-out problems before and after."""
    command = [sys.executable, "-m", "services", "up", "config/arithmetic.toml", "--run.steps=25"]
    command += [f"--run.id={run_id}", f"--run.folder={folder}", "--evaluation.every_steps=1000", *flags]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / run_id / "evaluations.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert (first["step"], last["step"]) == (0, 25)
    return first["accuracy"], last["accuracy"]


@pytest.mark.slow
async def test_the_example_learns(tmp_path: Path) -> None:
    before, after = await run(tmp_path, "real")
    assert before <= 0.40
    assert after >= 0.65


@pytest.mark.slow
async def test_with_a_learning_rate_of_zero_nothing_changes(tmp_path: Path) -> None:
    before, after = await run(tmp_path, "still", "--trainer.learning_rate=0", "--trainer.warmup_steps=0")
    assert after == pytest.approx(before, abs=1.5 / PROBLEMS), "but for a tie between two tokens"


@pytest.mark.slow
async def test_rewards_by_lot_teach_nothing(tmp_path: Path) -> None:
    # The held-out problems are scored by the same run, so only what it learned is judged: by a second look at its policy.
    await run(tmp_path, "lot", f"--{LOT}")
    assert _accuracy(tmp_path / "lot" / "policy") <= 0.45


def _accuracy(policy: Path) -> float:
    """Decode the held-out problems greedily with plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    rows = [json.loads(line) for line in (ROOT / "examples/arithmetic/heldout.jsonl").read_text().splitlines()]
    ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows])  # all are of one length
    with torch.no_grad():
        for _ in range(4):
            logits = model(input_ids=ids).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    end = tokenizer.eos_token
    texts = tokenizer.batch_decode(ids)
    return sum(f"{row['prompt']}{row['answer']}{end}" in text for row, text in zip(rows, texts, strict=True)) / len(
        rows
    )
