"""The teaching example makes the trainer's step: the same batch moves the same weights to the same place."""

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.shared.bus.messages import Experience
from tests.support import tiny
from tests.support.tolerance import GRADIENT
from tests.trainer.algorithm.test_update import Rank, batch, settings

PAGE = Path(__file__).parents[3] / "examples" / "one-page" / "grpo.py"


def page() -> Any:
    spec = importlib.util.spec_from_file_location("one_page_grpo", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_tensors(module: Any, experiences: Sequence[Experience]) -> Any:
    """Return the batch as the page has it: prompts padded on the left, completions on the right."""
    rows = [(e.group.prompt_token_ids, s) for e in experiences for s in e.group.samples]
    before, after = max(len(prompt) for prompt, _ in rows), max(len(sample.token_ids) for _, sample in rows)

    def pad(values: Any, size: int, *, left: bool, like: Any) -> Any:
        filler = np.zeros(size - len(values), like)
        return np.concatenate([filler, values] if left else [values, filler])

    def stack(columns: list[Any], size: int, *, left: bool, like: Any = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.stack([pad(column.astype(like), size, left=left, like=like) for column in columns]))

    prompts, samples = [prompt for prompt, _ in rows], [sample for _, sample in rows]
    return module.Batch(
        stack(prompts, before, left=True),
        stack([np.ones(len(prompt)) for prompt in prompts], before, left=True),
        stack([sample.token_ids for sample in samples], after, left=False),
        stack([np.ones(len(sample.token_ids)) for sample in samples], after, left=False),
        stack([sample.behavior_logprobs for sample in samples], after, left=False, like=np.float32),
        torch.from_numpy(np.stack([e.rewards for e in experiences])),
    )


@pytest.mark.usefixtures("one_rank")
def test_the_page_makes_the_trainers_step() -> None:
    module = page()
    module.SAMPLES = len(batch()[0].group.samples)
    rank = Rank(settings())
    before = [weight.clone() for weight in rank.weights().values()]
    measured = rank.learn(batch())
    policy = tiny.model(0).requires_grad_(True).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    loss = module.train(policy, optimizer, as_tensors(module, batch()))
    assert loss == pytest.approx(measured["loss"], rel=1e-4)
    gradients = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    assert float(gradients.norm()) == pytest.approx(min(measured["grad_norm"], module.MAX_NORM), rel=GRADIENT)
    moved = torch.cat([(new - old).flatten() for new, old in zip(rank.weights().values(), before, strict=True)])
    page_moved = torch.cat([(w.detach() - old).flatten() for w, old in zip(policy.parameters(), before, strict=True)])
    assert float((moved - page_moved).norm() / moved.norm()) < 1e-3, "AdamW divides by gradients that nearly vanish"


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(PAGE), "--steps", "1"])
    runpy.run_path(str(PAGE), run_name="__main__")
    assert capsys.readouterr().out.startswith("step   1  reward 0.")
