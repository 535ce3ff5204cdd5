"""Advantages and losses agree with TRL's on the same tensors: TRL's are padded (B × T), ours flat (N)."""

import types
import warnings
from collections import defaultdict
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from penstock.services.trainer.algorithm.advantages import GroupAdvantage, group_advantages
from penstock.services.trainer.algorithm.loss import corrections, kl
from penstock.services.trainer.algorithm.loss.aggregation import Aggregation, Count, divisor, sequence_sums, total
from penstock.services.trainer.algorithm.rules import cispo, clip, gspo
from penstock.services.trainer.algorithm.rules.dpo import dpo
from tests.support.tolerance import ULPS

B, T, LONGEST = 6, 7, 16


class Tensors:
    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor([7, 3, 5, 1, 6, 2])
        self.mask = (torch.arange(T)[None] < self.lengths[:, None]).float()
        self.old = -2.0 * torch.rand(B, T, generator=generator) - 0.1
        self.policy = (self.old + 0.5 * torch.randn(B, T, generator=generator)).requires_grad_()
        self.reference = self.old + 0.3 * torch.randn(B, T, generator=generator)
        self.sampled = self.old + 0.4 * torch.randn(B, T, generator=generator)
        self.advantages = torch.randn(B, generator=generator)
        self.tokens = int(self.lengths.sum())

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        return padded[self.mask.bool()]


def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl.trainer.dpo_trainer
        import trl.trainer.grpo_trainer

        return trl.trainer


def their_loss(tensors: Tensors, loss_type: str, **changes: Any) -> torch.Tensor:
    arguments = types.SimpleNamespace(use_bias_correction_kl=False, delta=changes.pop("delta", None))
    mode = types.SimpleNamespace(training=True)
    accelerator = types.SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    ratio = changes.pop("importance_sampling_ratio", None)
    stand_in = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (tensors.policy, torch.zeros(B, T), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0,
        importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.28, loss_type=loss_type, args=arguments,
        use_vllm=ratio is not None, vllm_importance_sampling_correction=True, model=mode,
        current_gradient_accumulation_steps=1, max_completion_length=LONGEST, accelerator=accelerator,
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    stand_in.args.steps_per_generation = 1
    for name, value in changes.items():
        setattr(stand_in, name, value)
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.int64), "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T, dtype=torch.int64), "completion_mask": tensors.mask,
        "advantages": tensors.advantages, "old_per_token_logps": tensors.old, "ref_per_token_logps": tensors.reference,
        "num_items_in_batch": tensors.mask.sum(), "importance_sampling_ratio": ratio,
    }  # fmt: skip
    loss: torch.Tensor = trl().grpo_trainer.GRPOTrainer._compute_loss(stand_in, None, inputs)
    return loss


def whole(tensors: Tensors, loss_N: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    return total(loss_N, tensors.lengths, aggregation) / divisor(aggregation, Count(tensors.tokens, B), LONGEST)


def assert_agree(tensors: Tensors, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    (mine,) = torch.autograd.grad(ours, tensors.policy, retain_graph=True)
    (other,) = torch.autograd.grad(theirs, tensors.policy)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=ULPS)
    assert torch.allclose(mine, other, atol=ULPS)


def flat(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        tensors.flat(tensors.policy),
        tensors.flat(tensors.old),
        tensors.advantages.repeat_interleave(tensors.lengths),
    )


@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [("grpo", "sequence"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "constant")],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_clipped_ratio_is_trls_in_each_aggregation(loss_type: str, aggregation: Aggregation, seed: int) -> None:
    tensors = Tensors(seed)
    ours = clip.clipped_ratio(*flat(tensors), 0.2, 0.28).loss_N
    assert_agree(tensors, whole(tensors, ours, aggregation), their_loss(tensors, loss_type))


def test_dual_clip_is_trls_delta() -> None:
    tensors = Tensors()
    ours = clip.clipped_ratio(*flat(tensors), 0.2, 0.28, dual_clip=1.5).loss_N
    assert_agree(tensors, whole(tensors, ours, "sequence"), their_loss(tensors, "grpo", delta=1.5))


def test_gspo_is_trls_grpo_at_sequence_level() -> None:
    tensors = Tensors()
    policy, old, advantages = flat(tensors)
    ours = gspo.sequence_clipped_ratio(policy, old, advantages, tensors.lengths, 0.1, 0.15).loss_N
    theirs = their_loss(tensors, "grpo", importance_sampling_level="sequence", epsilon_low=0.1, epsilon_high=0.15)
    assert_agree(tensors, whole(tensors, ours, "sequence"), theirs)


def test_cispo_is_trls_whose_bound_is_the_weight_itself() -> None:
    tensors = Tensors()
    ours = cispo.clipped_weight(*flat(tensors), clip_high=0.5).loss_N
    assert_agree(tensors, whole(tensors, ours, "token"), their_loss(tensors, "cispo", epsilon_high=1.5))


def test_the_kl_in_the_loss_is_trls() -> None:
    tensors = Tensors()
    policy, old, advantages = flat(tensors)
    ours = clip.clipped_ratio(policy, old, advantages, 0.2, 0.28).loss_N
    ours = ours + 0.3 * kl.estimate(policy, tensors.flat(tensors.reference), "k3")
    assert_agree(tensors, whole(tensors, ours, "token"), their_loss(tensors, "bnpo", beta=0.3))


@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis", "token_mask", "sequence_mask"])
def test_corrections_are_trls_for_what_vllm_sampled(kind: corrections.Correction) -> None:
    # computed outside the loss (GRPOTrainer._generate_and_score_completions, TRL 1.16)
    tensors = Tensors()
    difference = (tensors.old - tensors.sampled) * tensors.mask
    ratio = torch.exp(difference.sum(-1, keepdim=True) if kind.startswith("sequence") else difference)
    masked = ratio.masked_fill((ratio < 0.8) | (ratio > 1.3), 0.0)
    ratio = ratio.clamp(max=1.3) if kind.endswith("tis") else masked
    policy, old, advantages = flat(tensors)
    weights = corrections.weights(old, tensors.flat(tensors.sampled), tensors.lengths, kind, 0.8, 1.3)
    ours = clip.clipped_ratio(policy, old, advantages, 0.2, 0.28).loss_N * weights
    assert int((weights != 1.0).sum()) > 0
    assert_agree(tensors, whole(tensors, ours, "token"), their_loss(tensors, "bnpo", importance_sampling_ratio=ratio))


def their_advantages(rewards: torch.Tensor, kind: str) -> torch.Tensor:
    """As TRL 1.16, by its own functions."""
    grpo, group = trl().grpo_trainer, rewards.shape[1]
    mean = rewards.mean(dim=1, keepdim=True)
    if kind == "rloo":
        return rewards - (rewards.sum(1, keepdim=True) - rewards) / (group - 1)
    if kind == "dr_grpo":
        return rewards - mean
    deviation: torch.Tensor = grpo.nanstd(rewards, dim=1)[:, None]
    return (rewards - mean) / (deviation + 1e-4)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_advantages_within_a_group_are_trls(kind: GroupAdvantage) -> None:
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(3))
    ours = np.stack([group_advantages(group, kind) for group in rewards.numpy()])
    theirs = their_advantages(rewards, kind).numpy()
    if kind == "grpo":  # TRL divides by the deviation over n − 1; the paper and we over n
        deviation = rewards.numpy().std(axis=1, ddof=1, keepdims=True), rewards.numpy().std(axis=1, keepdims=True)
        theirs = theirs * (deviation[0] + 1e-4) / (deviation[1] + 1e-4)
    assert np.allclose(ours, theirs, atol=ULPS)


def their_dpo(tensors: Tensors, beta: float) -> torch.Tensor:
    """DPOTrainer's loss; its batch is all chosen, then all rejected; ours alternates."""
    order = [0, 2, 4, 1, 3, 5]
    ours, reference = MagicMock(), MagicMock()
    ours.log_probs, reference.log_probs = (
        (tensors.policy * tensors.mask)[order],
        (tensors.reference * tensors.mask)[order],
    )
    ours.entropy, ours.mean_logits, ours.is_top1 = torch.zeros(B, T), torch.zeros(B, T), torch.zeros(B, T).bool()
    stand_in = MagicMock(aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=False, beta=beta)
    stand_in.f_divergence_type, stand_in.loss_types, stand_in.loss_weights = "reverse_kl", ["sigmoid"], [1.0]
    stand_in.use_weighting, stand_in.ref_model = False, lambda **_: reference
    stand_in.accelerator.gather_for_metrics = stand_in.accelerator.gather = lambda x: x
    mask = torch.cat([torch.zeros(B, 1), tensors.mask[order]], dim=1)
    inputs = {"input_ids": torch.zeros(B, T + 1, dtype=torch.int64), "completion_mask": mask, "attention_mask": mask}
    loss: torch.Tensor = trl().dpo_trainer.DPOTrainer._compute_loss(stand_in, lambda **_: ours, inputs, False)
    return loss


def test_dpo_is_trls_sigmoid_loss() -> None:
    tensors = Tensors()
    policy_S = sequence_sums(tensors.flat(tensors.policy), tensors.lengths)
    reference_S = sequence_sums(tensors.flat(tensors.reference), tensors.lengths)
    assert_agree(tensors, dpo(policy_S, reference_S, beta=0.2).loss_P.mean(), their_dpo(tensors, 0.2))
