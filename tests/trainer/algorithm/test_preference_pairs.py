"""Laws of preference pairs: the loss of DPO over whole completions, whoever wrote them, and its figures."""

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.coordinator.admission.demonstrations import experience
from penstock.services.coordinator.data import load_data
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.metrics import batch_figures
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.phases import Phases
from penstock.shared.bus.messages import Experience, PolicyVersion
from tests.coordinator.admission import test_preference_pairs as admission
from tests.support import tiny
from tests.support.tolerance import FORWARD, GRADIENT
from tests.trainer.algorithm.test_mixture import ROUNDING, Bigrams
from tests.trainer.algorithm.test_trl import trl
from tests.trainer.algorithm.test_update import GROUPS, Rank, batch, demonstrated, lags, settings

pytestmark = pytest.mark.usefixtures("one_rank")

BETA = 0.3


def pairs() -> list[Experience]:
    """Return the first two samples of each group, of 2 and 5 tokens, as a pair, without behavior logprobs."""
    made = []
    for each in batch():
        kept = [
            dataclasses.replace(s, behavior_logprobs=np.zeros_like(s.behavior_logprobs)) for s in each.group.samples
        ]
        group = dataclasses.replace(each.group, samples=tuple(kept[:2]))
        made.append(Experience(group, np.array([1.0, 0.0], np.float32), each.scores[:2], 4.0, 0.0))
    return demonstrated(made)


def other() -> Bigrams:
    """Return another policy of one float64 matrix."""
    made = Bigrams()
    made.logits_VV = torch.randn(made.logits_VV.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return made


def bigram_sum(of: Bigrams, prompt: Any, token_ids: Any) -> Tensor:
    before = np.concatenate([prompt[-1:], token_ids[:-1]])
    return of.all_logprobs(before)[torch.arange(len(token_ids)), torch.from_numpy(token_ids).long()].sum()


def plain(groups: list[Experience], trained: Bigrams, reference: Bigrams) -> tuple[Tensor, list[float]]:
    """Return the mean of −log σ(β ((log π(c) − log ref(c)) − (log π(r) − log ref(r)))), and the margins."""
    losses, margins = [], []
    for group in (each.group for each in groups):
        prompt, (better, worse) = group.prompt_token_ids, (sample.token_ids for sample in group.samples)
        gain = bigram_sum(trained, prompt, better) - bigram_sum(reference, prompt, better)
        loss = bigram_sum(trained, prompt, worse) - bigram_sum(reference, prompt, worse)
        losses.append(torch.log(1 + torch.exp(-BETA * (gain - loss))))
        margins.append(BETA * float((gain - loss).detach()))
    return torch.stack(losses).mean(), margins


@pytest.mark.parametrize("cap", [4096, 18])
def test_the_loss_is_the_formulas_in_float64_however_pairs_are_packed(cap: int) -> None:
    groups, engine, reference = pairs(), Bigrams(), other()
    learner = Learner(
        cast(TrainingEngine, engine), settings(cap, preset="dpo", dpo_beta=BETA), Phases(), reference=reference.evaluate
    )
    held_out, measured = learner.figures_of(groups), learner.learn(groups, lags(groups, 9), 1)
    own = Bigrams()
    loss, margins = plain(groups, own, reference)
    loss.backward()
    ordered = sum(margin > 0 for margin in margins) / GROUPS
    assert 0 < ordered < 1
    assert held_out == {
        "evaluation_loss": pytest.approx(float(loss.detach()), rel=ROUNDING),
        "evaluation_accuracy": ordered,
    }
    assert measured["loss"] == measured["rl_loss"] == pytest.approx(float(loss.detach()), rel=ROUNDING)
    assert measured["preference_margin"] == pytest.approx(sum(margins) / GROUPS, rel=ROUNDING)
    assert measured["preference_accuracy"] == ordered
    assert engine.logits_VV.grad is not None
    assert own.logits_VV.grad is not None
    assert torch.allclose(engine.logits_VV.grad, own.logits_VV.grad, rtol=0, atol=ROUNDING)


def transformers_sums(model: Any, groups: list[Experience]) -> Tensor:
    """Return the logprob of each completion by the model alone, one unpadded sequence at a time, in float64."""
    sums = []
    for group in (each.group for each in groups):
        for sample in group.samples:
            ids = np.concatenate([group.prompt_token_ids, sample.token_ids]).astype(np.int64)
            logits_TV = model(input_ids=torch.from_numpy(ids)[None]).logits[0].double()
            targets = torch.from_numpy(ids[len(group.prompt_token_ids) :])
            own_TV = logits_TV[len(group.prompt_token_ids) - 1 : -1].log_softmax(-1)
            sums.append(own_TV[torch.arange(len(targets)), targets].sum())
    return torch.stack(sums)


@pytest.mark.parametrize("micro_batch_tokens", [4096, 18])
def test_the_loss_is_that_of_transformers_logits_and_learning_lowers_it(micro_batch_tokens: int) -> None:
    groups, model = pairs(), tiny.model(0).requires_grad_(True)
    with torch.no_grad():
        reference_S = transformers_sums(tiny.model(1), groups)
    gain_S = transformers_sums(model, groups) - reference_S
    margins_P = BETA * (gain_S[0::2] - gain_S[1::2])
    loss = -torch.nn.functional.logsigmoid(margins_P).mean()
    loss.backward()
    norm = float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    trained = Rank(settings(micro_batch_tokens, preset="dpo", dpo_beta=BETA))
    trained.learner._estimates.reference = Policy(tiny.model(1)).eval().requires_grad_(False)
    assert trained.learner.figures_of(groups)["evaluation_loss"] == pytest.approx(float(loss.detach()), abs=FORWARD)
    measured = trained.learn(groups)
    assert measured["loss"] == pytest.approx(float(loss.detach()), abs=FORWARD)
    assert measured["preference_margin"] == pytest.approx(float(margins_P.detach().mean()), abs=FORWARD)
    assert measured["grad_norm"] == pytest.approx(norm, rel=GRADIENT)
    for step in range(2, 16):
        trained.learn(groups, step)
    after = trained.learner.figures_of(groups)
    assert after["evaluation_loss"] < float(loss.detach()) / 2
    assert after["evaluation_accuracy"] == 1.0


def their_loss(rows: list[dict[str, Any]], folder: Path) -> tuple[float, float]:
    """Return loss and gradient norm of TRL's DPOTrainer, which tokenizes the rows itself, in one batch."""
    from datasets import Dataset

    dpo = trl().dpo_trainer
    arguments = dpo.DPOConfig(
        output_dir=str(folder), beta=BETA, per_device_train_batch_size=len(rows), report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    trainer = dpo.DPOTrainer(
        model=tiny.model(0).requires_grad_(True), ref_model=tiny.model(1), args=arguments,
        train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer(),
    )  # fmt: skip
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    return float(loss.detach()), float(torch.stack(norms).norm())


def test_the_same_rows_have_the_loss_and_the_gradient_of_trls_trainer(tmp_path: Path) -> None:
    rows = [
        {"prompt": "12+34=", "chosen": "46", "rejected": "4"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "377"},
        {"prompt": "99+1=", "chosen": "100", "rejected": "90"},
    ]
    loss, norm = their_loss(rows, tmp_path / "trl")
    problems = load_data(admission.settings(tmp_path, rows)).train.problems
    groups = [experience(problem, place, PolicyVersion(0)) for place, problem in enumerate(problems)]
    trained = Rank(settings(preset="dpo", dpo_beta=BETA, groups_per_step=len(groups)))
    trained.learner._estimates.reference = Policy(tiny.model(1)).eval().requires_grad_(False)
    assert trained.learner.figures_of(groups)["evaluation_loss"] == pytest.approx(loss, abs=FORWARD)
    measured = trained.learn(groups)
    assert measured["loss"] == pytest.approx(loss, abs=FORWARD)
    assert measured["grad_norm"] == pytest.approx(norm, rel=GRADIENT)


def test_at_the_reference_the_loss_is_log_2_and_no_pair_is_ordered() -> None:
    held_out = Rank(settings(preset="dpo")).learner.figures_of(pairs())
    assert held_out == {"evaluation_loss": pytest.approx(math.log(2), abs=FORWARD), "evaluation_accuracy": 0.0}


def test_figures_are_of_a_policy_that_drew_the_tokens_itself_and_there_are_no_rewards() -> None:
    groups = pairs()
    trained = Rank(settings(preset="dpo"))
    trained.learn(groups)
    measured = trained.learn(groups, 2)
    assert measured["preference_margin"] > 0
    assert measured["reference_kl"] == 0.0, "its estimate is over a policy's own tokens"
    assert (measured["kl_mean"], measured["ess"], measured["ratio_max"], measured["logprob_gap"]) == (
        0.0,
        1.0,
        1.0,
        0.0,
    )
    figures = batch_figures(groups, 1, {PolicyVersion(0): 0}, most_tokens=99)
    assert (figures.samples, figures.tokens) == (
        2 * GROUPS,
        sum(len(s.token_ids) for each in groups for s in each.group.samples),
    )
    assert not [name for name in figures.metrics if name.startswith(("reward_", "zero_std"))]


def test_a_replay_of_a_step_over_pairs_repeats_it_to_the_bit() -> None:
    groups = pairs()
    first, second = Rank(settings(18, preset="dpo")), Rank(settings(18, preset="dpo"))
    first.learn(groups)
    second.learn(groups, plan=first.learner.plan)
    before, after = first.weights(), second.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
