"""Laws of distillation from a teacher's most probable tokens: the KL and its gradient, forward passes, replays."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.services.trainer.algorithm.rules.distillation import top_k_kl
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.layers.logits import token_logprobs
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, StepPlan
from penstock.shared.errors import SettingsError
from penstock.shared.model.logits import partition
from penstock.shared.settings import Settings
from tests.support import tiny
from tests.support.teaching import with_tops
from tests.support.tolerance import FORWARD, GRADIENT, ULPS
from tests.trainer.algorithm.test_update import Rank, batch, policy, settings, timeless

pytestmark = pytest.mark.usefixtures("one_rank")

ROUNDING = 1e-12
"""Float64: some roundings of sums of 11 numbers."""
TOKENS, VOCABULARY = 7, 11
ALONE: dict[str, Any] = {"advantage": "none", "distillation": 1.0, "distillation_top_k": 3}


def random_logits(seed: int, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)


def temperatures() -> Tensor:
    return torch.linspace(0.5, 1.5, TOKENS, dtype=torch.float64)


def coarse_kl(teacher_NV: Tensor, policy_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """The KL of the two distributions, row by row, after all tokens but ``ids_NK`` became one outcome."""
    rows = []
    for teacher_V, policy_V, ids_K in zip(teacher_NV, policy_NV, ids_NK.tolist(), strict=True):
        others = [token for token in range(VOCABULARY) if token not in ids_K]
        outcomes = [[token] for token in ids_K] + ([others] if others else [])
        p, q = ([of[tokens].sum() for tokens in outcomes] for of in (teacher_V, policy_V))
        rows.append(sum(a * (torch.log(a) - torch.log(b)) for a, b in zip(p, q, strict=True)))
    return torch.stack(rows)


def both(top_k: int, logits_NV: Tensor, teacher_logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the trainer's KL, ids, and logprobs of the teacher."""
    teacher_NV = torch.log_softmax(teacher_logits_NV / temperatures()[:, None], -1)
    ids_NK = teacher_NV.topk(top_k).indices.sort(-1).values
    kl_N = top_k_kl(teacher_NV.gather(-1, ids_NK), *partition(logits_NV, ids_NK, temperatures()))
    return kl_N, ids_NK, teacher_NV


@pytest.mark.parametrize("top_k", [1, 2, 5, VOCABULARY - 1, VOCABULARY])
def test_the_kl_and_its_gradient_are_those_of_the_distributions_with_the_tail_as_one_outcome(top_k: int) -> None:
    logits_NV, weights_N = random_logits(0).requires_grad_(), torch.linspace(0.1, 2.0, TOKENS)
    kl_N, ids_NK, teacher_NV = both(top_k, logits_NV, random_logits(1))
    expected_N = coarse_kl(teacher_NV.exp(), torch.softmax(logits_NV / temperatures()[:, None], -1), ids_NK)
    assert (kl_N >= 0).all()
    torch.testing.assert_close(kl_N, expected_N, rtol=0, atol=ROUNDING)
    gradients = [torch.autograd.grad((kl * weights_N).sum(), logits_NV)[0] for kl in (kl_N, expected_N)]
    torch.testing.assert_close(*gradients, rtol=0, atol=ROUNDING)


def test_with_the_whole_vocabulary_it_is_the_kl_over_the_vocabulary_and_its_gradient() -> None:
    logits_NV = random_logits(0).requires_grad_()
    kl_N, _, teacher_NV = both(VOCABULARY, logits_NV, random_logits(1))
    policy_NV = torch.log_softmax(logits_NV / temperatures()[:, None], -1)
    expected = nn.functional.kl_div(policy_NV, teacher_NV, reduction="sum", log_target=True)
    assert float(kl_N.detach().sum()) == pytest.approx(float(expected.detach()), abs=ROUNDING)
    gradients = [torch.autograd.grad(kl, logits_NV)[0] for kl in (kl_N.sum(), expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("top_k", [1, 4, VOCABULARY])
def test_a_policy_that_agrees_with_its_teacher_is_at_the_minimum(top_k: int) -> None:
    logits_NV = random_logits(0).requires_grad_()
    kl_N, _, _ = both(top_k, logits_NV, logits_NV.detach())
    (gradient_NV,) = torch.autograd.grad(kl_N.sum(), logits_NV)
    assert kl_N.abs().max() < ROUNDING
    assert gradient_NV.abs().max() < ROUNDING


@pytest.mark.parametrize("certain", [12.0, 25.0, 60.0])
def test_in_float32_a_policy_that_is_almost_certain_has_the_gradient_of_float64(certain: float) -> None:
    """1 − Σ π is 0 in float32 from 17 nats on; the teacher's tail has a third of its probability."""
    teacher_NK = torch.log(torch.tensor([[0.5, 1 / 6]], dtype=torch.float64))
    ids_NK, gradients = torch.tensor([[0, 1]]), []
    for dtype in (torch.float32, torch.float64):
        logits_NV = torch.tensor([[certain, certain - 1.0, 0.3, -0.2, 1.0]], dtype=dtype, requires_grad=True)
        policy = partition(logits_NV, ids_NK, torch.ones(1, dtype=dtype))
        (gradient_NV,) = torch.autograd.grad(top_k_kl(teacher_NK.to(dtype), *policy).sum(), logits_NV)
        gradients.append(gradient_NV.double())
    torch.testing.assert_close(*gradients, rtol=0, atol=ULPS)
    assert gradients[0][0, 2:].sum() == pytest.approx(-1 / 3, abs=1e-4)


def test_a_teacher_that_rounds_above_one_or_is_certain_gives_a_finite_loss_and_gradient() -> None:
    logits_NV = torch.tensor([[0.0, -3.0, 2.0], [1.0, 0.0, -200.0]], requires_grad=True)
    teacher_NK = torch.tensor([[0.0, -13.0], [0.0, -1e6]])
    kl_N = top_k_kl(teacher_NK, *partition(logits_NV, torch.tensor([[0, 1], [0, 1]]), torch.ones(2)))
    (gradient_NV,) = torch.autograd.grad(kl_N.sum(), logits_NV)
    expected_NV = torch.softmax(logits_NV.detach(), -1) - torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(gradient_NV, expected_NV, rtol=0, atol=1e-5)  # e^-13 is 2e-6
    assert torch.isfinite(kl_N).all()


@pytest.mark.parametrize("kind", ["model", "float32"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("chunk_tokens", "keep"), [(0, False), (3, False), (3, True), (100, False)])
def test_chunks_and_recomputation_give_the_same(kind: Any, fused: bool, chunk_tokens: int, keep: bool) -> None:
    torch.manual_seed(0)
    output, hidden_ND = nn.Linear(8, VOCABULARY, bias=False), torch.randn(TOKENS, 8, requires_grad=True)
    tops_NK = random_logits(1).topk(4).indices.sort(-1).values
    given = (torch.arange(TOKENS), temperatures().float())
    expected = partition(output(hidden_ND), tops_NK, given[1])
    out = token_logprobs(
        hidden_ND, copy.deepcopy(output), *given, chunk_tokens, fused=fused, kind=kind, keep=keep, tops_NK=tops_NK
    )
    measured = (out.top_logprobs_NK, out.others_logprobs_N)
    gradients = []
    for top_NK, others_N in (measured, expected):
        assert top_NK is not None
        assert others_N is not None
        loss = top_NK.square().sum() + others_N.square().sum()
        gradients.append(torch.autograd.grad(loss, hidden_ND)[0])
    torch.testing.assert_close(measured, expected, rtol=ULPS, atol=ULPS)
    torch.testing.assert_close(*gradients, rtol=GRADIENT, atol=GRADIENT)


def taught(seed: int = 5, top_k: int = 3) -> list[Experience]:
    """The batch with the most probable tokens of a random teacher, as the trainer reads it."""
    return [wire.decode(wire.encode(each), Experience) for each in with_tops(batch(), seed, top_k)]


def test_the_loss_of_a_step_is_the_mean_over_tokens_of_the_kl_of_whole_sequences() -> None:
    losses = []
    for experience in taught():
        for sample in experience.group.samples:
            row = PackedRow(experience.group.prompt_token_ids, (sample,), (0,))
            probabilities = [torch.softmax(_logits(of, row).double(), -1) for of in (tiny.model(5), policy().model)]
            assert sample.teacher_top_ids is not None
            ids_NK = torch.from_numpy(sample.teacher_top_ids.copy()).long()
            teacher_NV, policy_NV = probabilities
            p, q = (torch.cat([x.gather(-1, ids_NK), 1 - x.gather(-1, ids_NK).sum(-1, keepdim=True)], -1)
                    for x in (teacher_NV, policy_NV))  # fmt: skip
            losses += (p * (p / q).log()).sum(-1).tolist()
    measured = Rank(settings(**{**ALONE, "distillation": 0.5})).learn(taught())
    assert measured["distillation_loss"] == pytest.approx(0.5 * float(np.mean(losses)), rel=FORWARD)
    assert measured["rl_loss"] == 0.0
    assert measured["loss"] == measured["distillation_loss"]


def _logits(model: Any, row: PackedRow) -> Tensor:
    whole = np.concatenate([row.prompt_token_ids, row.samples[0].token_ids])[None, :-1]
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.from_numpy(whole).long()).logits[0, len(row.prompt_token_ids) - 1 :]
    return logits


def test_a_teacher_that_is_the_policy_moves_no_weight_and_another_one_is_approached() -> None:
    own = Rank(settings(**ALONE)).learn(taught(0))
    assert own["distillation_loss"] == pytest.approx(0.0, abs=1e-5)
    assert own["grad_norm"] < 1e-3
    student = Rank(settings(**ALONE))
    steps = [student.learn(taught(), step)["distillation_loss"] for step in range(1, 7)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 0.9 * steps[0]


def test_rewards_are_learned_from_beside_the_teacher_and_the_sampled_logprob_is_not() -> None:
    alone, with_teacher = Rank(settings()).learn(batch()), Rank(settings(distillation=1.0, distillation_top_k=3))
    measured = with_teacher.learn(taught())
    assert measured["rl_loss"] == alone["rl_loss"]
    assert measured["loss"] == measured["rl_loss"] + measured["distillation_loss"]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_forward_passes_of_any_size_and_replays_give_the_same_also_with_contexts(aggregation: str) -> None:
    contexts = (0, 2, 3, 1) * 4
    chosen = {**ALONE, "aggregation": aggregation, "minibatches": 2, "epochs": 2}
    whole, cut, again = (Rank(settings(micro_batch_tokens=tokens, **chosen)) for tokens in (4096, 18, 18))
    in_one_pass, other = (each.learn(taught(), contexts=contexts) for each in (whole, cut))
    assert in_one_pass["distillation_loss"] == pytest.approx(other["distillation_loss"], rel=FORWARD)
    assert in_one_pass["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * GRADIENT)
    assert cut.learner.plan is not None
    plan = wire.decode(wire.encode(cut.learner.plan), StepPlan)
    assert timeless(again.learn(taught(), plan=plan)) == timeless(other)
    assert all(torch.equal(tensor, again.whole()[name]) for name, tensor in cut.whole().items())


def test_trained_tokens_keep_their_own_teachers_tokens() -> None:
    group, contexts = taught()[0].group, (0, 2, 3, 1)
    row = PackedRow(group.prompt_token_ids, group.samples, (0, 1, 2, 3), contexts=contexts)
    teacher = micro_batch([row]).teacher
    assert teacher is not None
    kept = [sample.teacher_top_ids[context:] for sample, context in zip(group.samples, contexts, strict=True)]  # type: ignore[index]
    assert teacher.ids_NK.tolist() == np.concatenate(kept).tolist()
    assert micro_batch([]).teacher is None


def _without(experience: Experience) -> Experience:
    first, *others = experience.group.samples
    bare = dataclasses.replace(first, teacher_top_ids=None, teacher_top_logprobs=None)
    return dataclasses.replace(experience, group=dataclasses.replace(experience.group, samples=(bare, *others)))


@pytest.mark.parametrize(
    ("change", "number"), [(_without, 0), (lambda experience: with_tops([experience], 5, 2)[0], 2)]
)
def test_a_journalled_group_with_other_most_probable_tokens_is_refused_by_name(
    change: Callable[[Experience], Experience], number: int
) -> None:
    groups = taught()
    with pytest.raises(SettingsError, match=f"with group 2 in the journal, found {number}: .* = {number}; set that"):
        Rank(settings(**ALONE)).learn([*groups[:2], change(groups[2]), groups[3]])


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        (
            {"algorithm": {"distillation_top_k": 4}},
            "algorithm.distillation_top_k to be left out with algorithm.distillation = 0",
        ),
        ({"algorithm": {**ALONE, "distillation_skew": 0.1}}, "expected algorithm.distillation_skew = 0 with algorithm"),
        ({"algorithm": {**ALONE, "distillation_top_k": 65}}, "less than or equal to 64"),
        ({"algorithm": ALONE, "sampling": {"top_k": 20}}, "expected no top_p, top_k, min_p"),
        (
            {"algorithm": ALONE, "reward": {"teachers": [{"name": name, "model": name} for name in ("a", "b")]}},
            "expected data.teacher_field with algorithm.distillation_top_k and several",
        ),
        (
            {"algorithm": {**ALONE, "distillation_top_k": 64}, "sampling": {"group_size": 16, "max_new_tokens": 65536}},
            "expected at most 256 MiB of teachers' logprobs in a group, found 512, 8 bytes for each of",
        ),
    ],
)
def test_what_was_not_verified_is_refused(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings.model_validate(tables)
