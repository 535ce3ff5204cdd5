"""Layers with state: packed sequences do not affect each other."""

import copy
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.batch.assignment import assign_pieces
from penstock.services.trainer.batch.packing import PackedRow, micro_batch, part, split_row
from penstock.services.trainer.batch.segments import Segments
from penstock.services.trainer.model.layers import mixers, spans
from penstock.services.trainer.model.layers.attention import CannotPack
from penstock.services.trainer.model.policy import Policy
from penstock.shared.model.context import MIXERS, mixer_of
from tests.support import builders, tiny_hybrids
from tests.support.model_configurations import configurations
from tests.support.tiny_hybrids import HYBRIDS, VOCABULARY

CONFIGURATIONS = configurations()
TOLERANCE = 5e-5
"""Nats, and of a gradient's norm, by reordered float32 sums. Worst is the gated delta rule's triangular systems:
transformers' own differs by 1e-5 with chunks of 32 instead of 64 tokens. A neighbour's tokens make over 0.1.
"""

SHORT = ((9, (1, 7, 20)), (5, (2, 12)))
LONG = ((150, (90, 33, 1, 2)), (40, (64, 5)), (200, (1,)))
"""Tokens of prompts and completions, beyond a fork's prompt (128), a chunk (64) and a convolution (4)."""


def rows(shape: Sequence[tuple[int, Sequence[int]]], *, shares_prompt: bool = True) -> list[PackedRow]:
    random, packed, place = np.random.default_rng(0), list[PackedRow](), 0
    for prompt, lengths in shape:
        ids = random.integers(3, VOCABULARY, prompt).astype(np.int32)
        completions = [random.integers(3, VOCABULARY, n).astype(np.int32) for n in lengths]
        samples = tuple(
            dataclasses.replace(builders.sample(tokens=len(completion)), token_ids=completion)
            for completion in completions
        )
        packed.append(PackedRow(ids, samples, tuple(range(place, place + len(lengths))), 0.8, shares_prompt))
        place += len(lengths)
    return packed


def by_itself(model: Any, of: Sequence[PackedRow]) -> Tensor:
    parts = []
    for row in of:
        for sample in row.samples:
            ids = torch.from_numpy(np.concatenate((row.prompt_token_ids, sample.token_ids))).long()[None]
            prompt = len(row.prompt_token_ids)
            logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1] / row.temperature
            parts.append(logits.log_softmax(-1).gather(-1, ids[0, prompt:, None])[:, 0])
    return torch.cat(parts)


def gradient(model: Any, logprobs_N: Tensor) -> Tensor:
    weights = torch.randn(logprobs_N.shape, generator=torch.Generator().manual_seed(1)).to(logprobs_N.device)
    model.zero_grad()
    (logprobs_N @ weights).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_equal(policy: Policy, model: Any, of: Sequence[PackedRow]) -> None:
    ours, theirs = policy(micro_batch(of)).policy_logprobs_N, by_itself(model, of)
    assert float((ours - theirs).detach().abs().max()) < TOLERANCE
    mine, its = gradient(policy.model, ours), gradient(model, theirs)
    assert float((mine - its).norm() / its.norm()) < TOLERANCE


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("shape", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_packed_sequence_has_the_logprobs_and_gradients_of_itself_alone(
    name: str, shape: Sequence[tuple[int, Sequence[int]]], *, checkpointing: bool
) -> None:
    model = HYBRIDS[name]()
    policy = Policy(copy.deepcopy(model), packing="rows")
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    assert_equal(policy, model, rows(shape))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("dtype", "mean_nats", "most_gradient"),
    # float32 kernels may use TF32 (10 bits); bfloat16 has 8. A lost boundary costs over 0.5.
    [(torch.float32, 2e-3, 2e-2), (torch.bfloat16, 5e-2, 0.25)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("name", HYBRIDS)
def test_on_a_gpu_the_kernels_that_are_installed_fork_a_prompts_state_with_its_gradients(
    name: str, dtype: torch.dtype, mean_nats: float, most_gradient: float
) -> None:
    policy, batch = Policy(HYBRIDS[name]().to("cuda", dtype)).train(), micro_batch(rows(LONG))
    packed = policy(batch).policy_logprobs_N
    its = gradient(policy.model, packed)
    policy.trunk.use("sequences")
    alone = policy(batch).policy_logprobs_N
    assert float((packed - alone).detach().abs().mean()) < mean_nats
    theirs = gradient(policy.model, alone)
    assert float((its - theirs).float().norm() / theirs.float().norm()) < most_gradient


def test_a_layer_that_is_computed_again_keeps_the_boundaries_of_its_first_computation() -> None:
    model = tiny_hybrids.short_convolution()
    policy = Policy(copy.deepcopy(model), packing="rows")
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    first = policy(micro_batch(rows(SHORT))).policy_logprobs_N
    policy(micro_batch(rows(LONG)))
    mine, its = gradient(policy.model, first), gradient(model, by_itself(model, rows(SHORT)))
    assert float((mine - its).norm() / its.norm()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        # two chunks of 64 once, the other 22 per completion, padded to 22 + 89; the rest with prompts, padded to 200
        ("gated delta net", 128 + 3 * (22 + 89) + 3 * 200),
        ("Mamba", 3 * 239 + 3 * 239),  # all with their prompts, padded to 150 + 89
    ],
)
def test_a_long_prompt_is_computed_once_where_a_state_can_be_continued(name: str, tokens: int) -> None:
    policy = Policy(HYBRIDS[name](), packing="rows")
    projection = next(m for n, m in policy.model.named_modules() if n.endswith(("in_proj", "in_proj_qkv")))
    seen = list[int]()
    projection.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:2].numel()))
    policy(micro_batch(rows(((150, (90, 33, 2)), (40, (64, 5)), (200, (1,))))))
    assert sum(seen) == tokens


@pytest.mark.parametrize("shares_prompt", [True, False])
@pytest.mark.parametrize("make", [*HYBRIDS.values(), tiny_hybrids.of_its_own])
def test_sequence_by_sequence_is_exact_however_rows_are_laid_out(make: Any, *, shares_prompt: bool) -> None:
    model = make()
    policy = Policy(copy.deepcopy(model), packing="sequences").train()
    assert_equal(policy, model, rows(SHORT, shares_prompt=shares_prompt))


def test_a_model_that_is_not_known_to_pack_is_trained_sequence_by_sequence_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock.services.trainer.model.trunk"):
        policy = Policy(tiny_hybrids.of_its_own())
    assert policy.trunk.packing == "sequences"
    assert policy.trunk.reason.startswith("GPTJAttention reads other tokens in a way that is not known to keep packed")
    assert "each prompt is computed once for each of its completions" in policy.trunk.reason
    own = [record.message for record in caplog.records if record.name == "penstock.services.trainer.model.trunk"]
    assert own == ["sequences are not packed"]
    with pytest.raises(CannotPack, match=r'GPTJAttention .* change trainer.packing to "auto" or "sequences"'):
        Policy(tiny_hybrids.of_its_own(), packing="rows")


@pytest.mark.parametrize("name", HYBRIDS)
def test_known_models_are_packed_without_being_asked(name: str) -> None:
    assert Policy(HYBRIDS[name]()).trunk.packing == "rows"


def test_a_convolution_that_no_table_knows_is_not_packed() -> None:
    with mock.patch.dict(mixers._CONTINUING, clear=True):
        assert mixers.unpackable(tiny_hybrids.short_convolution().get_decoder()) == "Lfm2ShortConv"


def test_a_policy_may_change_from_rows_to_sequences_and_back() -> None:
    policy, batch = Policy(tiny_hybrids.gated_delta_net()), micro_batch(rows(SHORT))
    with torch.no_grad():
        packed = policy(batch).policy_logprobs_N
        policy.trunk.use("sequences")
        alone = policy(batch).policy_logprobs_N
        policy.trunk.use("rows")
        again = policy(batch).policy_logprobs_N
    assert torch.allclose(packed, alone, atol=TOLERANCE)
    assert torch.equal(packed, again)


def test_a_copy_of_a_policy_keeps_its_sequences_apart_too() -> None:
    policy, batch = Policy(tiny_hybrids.short_convolution()), micro_batch(rows(SHORT))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(policy)(batch).policy_logprobs_N, policy(batch).policy_logprobs_N)


def test_a_row_that_repeats_its_prompt_costs_what_its_sequences_cost() -> None:
    (shared,), (repeated,) = rows(((10, (3, 1, 5)),)), rows(((10, (3, 1, 5)),), shares_prompt=False)
    assert (shared.tokens, repeated.tokens) == (10 + 2 + 0 + 4, 3 * 10 + 2 + 0 + 4)
    alone = [part(repeated, n, n + 1) for n in range(3)]
    assert (
        repeated.visible_pairs == sum(row.visible_pairs for row in alone) == 12 * 13 // 2 + 10 * 11 // 2 + 14 * 15 // 2
    )
    batch = micro_batch([repeated])
    assert batch.tokens == 36
    assert batch.segments.starts_K.tolist() == [0, 10, 12, 22, 32]
    assert batch.segments.before.tolist() == [0, 10, 0, 0, 10]
    assert batch.lengths_S.tolist() == [3, 1, 5]


def test_repeated_prompts_count_towards_the_cap_of_a_micro_batch() -> None:
    (repeated,) = rows(((10, (3, 1, 5)),), shares_prompt=False)
    assert [piece.places for piece in split_row(repeated, 24)] == [(0, 1), (2,)]  # 12 + 10; 14 tokens
    (pair,) = rows(((10, (3, 3)),), shares_prompt=False)
    assert assign_pieces([pair], 12, 1, split=False) == [[[pair]]]  # a preference pair stays together


def test_similar_lengths_go_together_and_a_long_one_alone() -> None:
    assert spans.similar([10, 4000, 12, 11]) == [[1], [2, 3, 0]]
    assert spans.similar([]) == []


def test_a_plan_brings_every_token_back_to_its_place() -> None:
    segments: Segments = micro_batch(rows(LONG)).segments
    tokens = int(segments.lengths_K.sum())
    values = torch.arange(tokens, dtype=torch.float32)[None, :, None]
    for make in (spans.alone, spans.whole, spans.forked):
        plan = make(segments, torch.device("cpu"))
        outputs = [spans.gather(values, span.places_GW, tokens) for span in plan.spans]
        assert torch.equal(spans.scatter(outputs, plan), values)


def test_mixers_are_known_by_model_type_without_a_model() -> None:
    assert set(MIXERS.values()) == {*mixers._CONTINUING, *mixers._WHOLE}


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba", "minimax",
                                  "nemotron_h", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "zamba2", "zaya", "llama"])  # fmt: skip
def test_the_configuration_names_the_mixer_that_the_model_has(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = CONFIGURATIONS[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fields = config.to_dict()
    assert mixer_of(fields.get("text_config") or fields) == mixers.known(model)
