"""Trees of tokens: computed once, with the logprobs and gradients of their branches."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.batch.packing import PackedRow, assign_pieces, micro_batch
from services.trainer.batch.segments import Segments
from services.trainer.model.layers import attention_layout
from services.trainer.model.layers.attention import PackedLayout
from services.trainer.model.layers.attention_layout import CAUSAL, Pattern
from services.trainer.model.layers.attention_math import PLAIN
from services.trainer.model.policy import Policy
from shared.bus.messages import Sample
from tests.support import builders, tiny, tiny_hybrids, trees
from tests.trainer.model.test_attention import WAYS, loop_varlen, one_by_one

EXACT = 1e-12
"""Float64, sums in another order."""


def families() -> dict[str, Any]:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

    def of(config: Any, model: Any, **more: Any) -> Any:
        torch.manual_seed(0)
        return model(config(
            vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            layer_types=["sliding_attention", "full_attention"], sliding_window=6, attn_implementation="eager", experts_implementation="eager", **more,
        ))  # fmt: skip

    return {
        "causal": tiny.model,
        "windows and caps": lambda: of(Gemma2Config, Gemma2ForCausalLM),
        "windows and sinks": lambda: of(GptOssConfig, GptOssForCausalLM, num_local_experts=4, num_experts_per_tok=2),
        **tiny_hybrids.HYBRIDS,
    }


FAMILIES = ["causal", "windows and caps", "windows and sinks", *tiny_hybrids.HYBRIDS]


def gradients(model: Any, logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    model.zero_grad()
    (logprobs_N @ weights_N).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_has_the_logprobs_and_gradients_of_its_branches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "float32", torch.float64)  # what models and losses compute in float32
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    model = families()[name]().double().eval().requires_grad_(True)
    policy = Policy(copy.deepcopy(model), packing="rows")
    for seed, prompt, opening in ((0, 5, 7), (1, 0, 150), (2, 140, 5)):
        rows = [trees.group(seed, 40, prompt, opening=opening), trees.group(seed + 10, 40, 2, samples=1)]
        batch = micro_batch(rows)
        mine, theirs = policy(batch).policy_logprobs_N, trees.branch_logprobs(model, rows)
        assert float((mine - theirs).detach().abs().max()) < EXACT * 10
        weights_N = torch.randn(len(mine), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        left, right = gradients(policy.model, mine, weights_N), gradients(model, theirs, weights_N)
        assert float((left - right).norm() / right.norm()) < EXACT
        assert batch.tokens == sum(map(trees.trie_tokens, rows)) == sum(row.tokens for row in rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", [CAUSAL, Pattern("window", 12), Pattern("chunk", 16)], ids=lambda left: left.kind)
def test_every_way_of_attention_sees_the_tokens_of_a_path(
    way: str, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(attention_layout, name, value)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop_varlen)
    segments = micro_batch([trees.group(0, 40, segments=40), trees.group(1, 40, 0)]).segments
    shape = (2, int(segments.lengths_K.sum()), 6)
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3))
    packed = PackedLayout(segments, "varlen" if way == "varlen" else "mask", torch.device("cpu"))
    out = packed.attend(q[None], k[None], v[None], pattern)[0]
    assert torch.allclose(out, one_by_one(segments, q, k, v, pattern, PLAIN), rtol=0, atol=EXACT)


def test_a_key_is_visible_exactly_until_the_end_of_its_segments_subtree() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        parents, path = [-1], [0]
        for k in range(1, int(generator.integers(1, 20))):
            path = path[: int(generator.integers(0, len(path) + 1))]
            parents.append(path[-1] if path else -1)
            path.append(k)
        lengths = generator.integers(1, 5, len(parents))
        segments = Segments(np.cumsum(lengths) - lengths, lengths, np.array(parents))
        tokens, owner = int(lengths.sum()), np.repeat(np.arange(len(parents)), lengths)
        query, key = np.arange(tokens)[:, None], np.arange(tokens)
        of_path = np.array([[k in segments.path(int(q)) for k in owner] for q in owner])
        assert np.array_equal((key <= query) & (query < segments.until), (key <= query) & of_path)
        assert [segments.before[k] + lengths[k] for k in range(len(parents))] == [
            len(segments.places(segments.path(k))) for k in range(len(parents))
        ]


def test_rows_over_the_cap_are_cut_between_samples_and_train_every_sampled_token_once() -> None:
    rows = [trees.group(seed, 40, prompt, samples=6) for seed, prompt in ((0, 5), (1, 0), (2, 9))]
    rows = [
        dataclasses.replace(row, places=tuple(10 * n + place for place in row.places)) for n, row in enumerate(rows)
    ]
    most = max(dataclasses.replace(row, samples=(s,), places=(0,)).tokens for row in rows for s in row.samples) + 20
    pieces = [piece for chunks in assign_pieces(rows, most, 2) for chunk in chunks for piece in chunk]
    assert len(pieces) > 4
    assert all(micro_batch([piece]).tokens == piece.tokens <= most for piece in pieces)
    assert sorted(place for piece in pieces for place in piece.places) == sorted(p for row in rows for p in row.places)
    trained = sum(len(micro_batch([piece]).targets_N) for piece in pieces)
    assert trained == sum(sample.sampled_tokens for row in rows for sample in row.samples)


def test_equal_openings_are_computed_once_and_what_nothing_trained_follows_is_not() -> None:
    def sample(ids: list[int], segments: list[list[int]]) -> Sample:
        of = builders.sample(tokens=len(ids))
        return dataclasses.replace(of, token_ids=np.array(ids, np.int32), segments=np.array(segments, np.int32))

    # 7 8 9 is shared, then 5 | 6 are given apart; a given leaf (4 4), and the last token of a turn, are not computed
    first = sample([7, 8, 9, 5, 1, 2, 4, 4], [[0, -1, 0], [4, 0, 1], [6, 1, 0]])
    other = sample([7, 8, 9, 6, 3, 3, 2, 1], [[0, -1, 0], [4, 0, 1], [7, 0, 1]])
    batch = micro_batch([PackedRow(np.zeros(0, np.int32), (first, other), (0, 1))])
    assert batch.input_ids_BT.tolist() == [[7, 8, 9, 5, 1, 6, 3, 3]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    assert (batch.segments.starts_K.tolist(), batch.segments.parents_K.tolist()) == ([0, 3, 5], [-1, 0, 0])
    assert (batch.targets_N.tolist(), batch.columns_N.tolist()) == ([1, 2, 3, 3, 2, 1], [3, 4, 5, 6, 7, 5])
