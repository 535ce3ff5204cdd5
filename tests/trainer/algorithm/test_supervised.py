"""Laws of supervised steps: transformers' own cross-entropy, learning, and which groups are taken."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.shared.bus.messages import Experience
from tests.support import tiny
from tests.support.tolerance import FORWARD, GRADIENT
from tests.trainer.algorithm.test_update import Rank, batch, demonstrated, settings

pytestmark = pytest.mark.usefixtures("one_rank")


def transformers_loss(model: Any, groups: list[Experience]) -> torch.Tensor:
    """Return the mean loss of completion tokens, of padded rows in one batch."""
    rows = [(e.group.prompt_token_ids, sample.token_ids) for e in groups for sample in e.group.samples]
    longest = max(len(prompt) + len(tokens) for prompt, tokens in rows)
    ids_BT, labels_BT = np.zeros((len(rows), longest), np.int64), np.full((len(rows), longest), -100, np.int64)
    for row, (prompt, tokens) in enumerate(rows):
        end = len(prompt) + len(tokens)
        ids_BT[row, :end] = np.concatenate([prompt, tokens])
        labels_BT[row, len(prompt) : end] = tokens
    loss: torch.Tensor = model(input_ids=torch.from_numpy(ids_BT), labels=torch.from_numpy(labels_BT)).loss
    return loss


@pytest.mark.parametrize("micro_batch_tokens", [4096, 18])
def test_the_loss_is_transformers_cross_entropy_of_the_completions(micro_batch_tokens: int) -> None:
    groups = demonstrated(batch())
    model = tiny.model(0).requires_grad_(True)
    loss = transformers_loss(model, groups)
    loss.backward()
    norm = float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    trained = Rank(settings(micro_batch_tokens, loss="cross_entropy"))
    assert trained.learner.figures_of(groups) == {"evaluation_loss": pytest.approx(float(loss.detach()), abs=FORWARD)}
    measured = trained.learn(groups)
    assert measured["ce_loss"] == measured["loss"] == pytest.approx(float(loss.detach()), abs=FORWARD)
    assert measured["grad_norm"] == pytest.approx(norm, rel=GRADIENT)
    assert "rl_loss" not in measured
    assert trained.learner.figures_of(groups)["evaluation_loss"] < float(loss.detach())


def test_a_replay_of_a_supervised_step_repeats_it_to_the_bit() -> None:
    groups = demonstrated(batch())
    first, second = Rank(settings(loss="cross_entropy")), Rank(settings(loss="cross_entropy"))
    first.learn(groups)
    second.learn(groups, plan=first.learner.plan)
    before, after = first.weights(), second.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
