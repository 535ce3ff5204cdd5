"""Attention over packed rows equals separate sequences."""

import copy
import functools
import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.batch.segments import Segments
from penstock.services.trainer.model.layers import attention, attention_layout, attention_math, variable_length
from penstock.services.trainer.model.layers.attention import CannotPack, PackedLayout
from penstock.services.trainer.model.layers.attention_layout import CAUSAL, Pattern
from penstock.services.trainer.model.layers.attention_math import Extras
from penstock.services.trainer.model.policy import Policy
from tests.support import tiny
from tests.support.packed import rows, separate

CPU = torch.device("cpu")


def loop_varlen(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor,
    longest_query: int, longest_key: int, *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's varlen_attn, one sequence at a time: causal from the lower right corner, or a window."""
    assert window_size[1] == 0
    outputs = []
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]].transpose(0, 1)
        k, v = (t[key_ends[i] : key_ends[i + 1]].transpose(0, 1) for t in (key, value))
        assert (q.shape[1] <= longest_query, k.shape[1] <= longest_key) == (True, True)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        if window_size[0] >= 0:
            mask = mask.triu(k.shape[1] - q.shape[1] - window_size[0])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def loop_varlen_of_torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, *ends: Any, scale: float | None, window_size: Any
) -> Tensor:
    """torch 2.11's signature, without shared keys."""
    return loop_varlen(query, key, value, *ends, scale=scale, window_size=window_size, enable_gqa=True)


def one_by_one(segments: Segments, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, extras: Extras) -> Tensor:
    """Attention of H × T × D by its formula: T × H × D."""
    scale = q.shape[-1] ** -0.5 if extras.scale is None else extras.scale
    outputs = []
    for i in range(len(segments.starts_K)):
        keys = torch.from_numpy(attention_layout.keys_of(segments, i))
        positions, own = torch.arange(len(keys)), keys[len(keys) - int(segments.lengths_K[i]) :]
        seen = pattern.sees(positions[len(keys) - len(own) :, None], positions)
        shared = q.shape[0] // k.shape[0]
        scores = q[:, own] @ k[:, keys].repeat_interleave(shared, 0).transpose(1, 2) * scale
        if extras.softcap:
            scores = extras.softcap * torch.tanh(scores / extras.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if extras.sinks_H is not None:
            scores = torch.cat((scores, extras.sinks_H[:, None, None].expand(-1, len(own), 1)), -1)
        weights = torch.softmax(scores, -1)[..., : len(keys)]
        outputs.append((weights @ v[:, keys].repeat_interleave(shared, 0)).transpose(0, 1))
    return torch.cat(outputs)


WAYS = {
    "segments": {"SHORT_ROW_TOKENS": 0, "SLACK_PAIRS": 0},
    "pieces": {"SHORT_ROW_TOKENS": 0, "SLACK_PAIRS": 0, "MASKED_PAIRS": 500, "_LOWEST": 8},
    "prompts again": {"SHORT_ROW_TOKENS": 0, "SLACK_PAIRS": 0, "MASKED_PAIRS": 40, "_LOWEST": 8},
    "short rows whole": {},
    "varlen": {},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", [CAUSAL, Pattern("window", 12), Pattern("chunk", 16)], ids=lambda left: left.kind)
@pytest.mark.parametrize("extra", ["none", "sinks", "cap", "cap and sinks"])
def test_each_pattern_and_extra_gives_the_outputs_and_gradients_of_separate_sequences(
    way: str, pattern: Pattern, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(attention_layout, name, value)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop_varlen)
    segments, generator = micro_batch(rows(0)).segments, torch.Generator().manual_seed(0)
    tokens = int(segments.lengths_K.sum())

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    # heads of 6, values of 4, as in multi-head latent attention
    inputs = (draw(4, tokens, 6), draw(2, tokens, 6), draw(2, tokens, 4), draw(4))
    extras = Extras(scale=0.3, softcap=1.5 if "cap" in extra else None, sinks_H=inputs[3] if "sinks" in extra else None)
    direction = torch.randn(tokens, 4, 4, generator=generator, dtype=torch.float64)
    q, k, v, _ = inputs
    expected = one_by_one(segments, q, k, v, pattern, extras)
    gradients = torch.autograd.grad((expected * direction).sum(), inputs, allow_unused=True)

    singles = [tensor.detach().float().requires_grad_() for tensor in inputs]
    if extras.sinks_H is not None:
        extras = Extras(scale=0.3, softcap=extras.softcap, sinks_H=singles[3])
    kind: Any = "varlen" if way == "varlen" else "mask"
    packed = PackedLayout(segments, kind, CPU)
    q, k, v, _ = (tensor[None] for tensor in singles)
    out = packed.attend(q, k, v, pattern, extras)[0]
    assert torch.allclose(out, expected.float(), atol=1e-5)  # float32 against float64
    grads = torch.autograd.grad((out * direction.float()).sum(), singles, allow_unused=True)
    for mine, its in zip(grads, gradients, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            assert float((mine - its).norm() / its.norm()) < 1e-5


def test_a_window_is_of_positions_across_prompt_and_completion() -> None:
    # a prompt of 4, completions of 2 and 1 (computed) tokens; a window of 3
    segments = Segments(*(np.array(numbers) for numbers in ([0, 4, 6], [4, 2, 1], [-1, 0, 0])))
    assert segments.positions.tolist() == [0, 1, 2, 3, 4, 5, 4]
    (rectangle,), _ = attention_layout.rectangles(segments, CPU, Pattern("window", 3))
    assert isinstance(rectangle.mask_GQK, Tensor)
    seen = {}
    for query, mask in zip(rectangle.queries_GQ[0].tolist(), rectangle.mask_GQK[0], strict=True):
        seen[query] = rectangle.keys_GK[0][mask].tolist()
    assert seen == {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [1, 2, 3], 4: [2, 3, 4], 5: [3, 4, 5], 6: [2, 3, 6]}


@pytest.mark.parametrize(
    "pattern", [CAUSAL, Pattern("window", 512), Pattern("chunk", 4096)], ids=lambda left: left.kind
)
def test_a_mask_is_never_as_large_as_the_square_of_its_row(pattern: Pattern) -> None:
    # a prompt of 20,000 tokens, eight completions of 1,000: 784 million pairs
    starts = [0, *(20_000 + 1_000 * i for i in range(8))]
    segments = Segments(*(np.array(f) for f in (starts, [20_000] + [1_000] * 8, [-1] + [0] * 8)))
    sizes = []

    class Sizes(attention_layout._Sees):
        def mask(self, queries_GQ: Tensor, keys_GK: Tensor) -> Tensor | None:
            sizes.append(queries_GQ.shape[0] * queries_GQ.shape[1] * keys_GK.shape[1])
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_layout, "_Sees", Sizes)
        attention_layout.rectangles(segments, CPU, pattern, masked=True)
    assert max(sizes) <= 1 << 22
    reach = {"causal": 28_000, "window": 1024, "chunk": 6144}[pattern.kind]
    assert sum(sizes) <= 28_000 * reach * 1.5


def test_capped_scores_keep_no_masks_and_keys_of_a_long_row() -> None:
    # masks of 41 million pairs
    segments = Segments(*(np.array(f) for f in ([0, 20, 5_020], [20, 5_000, 4_000], [-1, 0, 0])))
    q, k, v = (torch.zeros(1, 1, 9_020, 8, requires_grad=True) for _ in range(3))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    gc.collect()
    before = {id(each) for each in gc.get_objects()}
    layout = PackedLayout(segments, "mask", CPU)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layout.attend(q, k, v, CAUSAL, Extras(softcap=1.5))
    kept = [each for each in gc.get_objects() if isinstance(each, Tensor) and id(each) not in before]
    assert sum({each.data_ptr(): each.numel() for each in (*kept, *saved)}.values()) < 10 * out.numel()


def test_long_completions_of_a_short_prompt_need_no_mask() -> None:
    # a prompt of 20 tokens, completions of 5,000 and 4,000: masks of 41 million pairs
    segments = Segments(*(np.array(f) for f in ([0, 20, 5_020], [20, 5_000, 4_000], [-1, 0, 0])))
    laid_out, places_T = attention_layout.rectangles(segments, CPU)
    assert [rectangle.mask_GQK for rectangle in laid_out] == [None] * 3
    assert sum(rectangle.queries_GQ.numel() for rectangle in laid_out) == 20 + 5_020 + 4_020
    assert len(set(places_T.tolist())) == 9_020


def test_a_sink_counts_in_half_precision_as_its_exact_value() -> None:
    # a key of score 62.5 / √10 = 19.7642 beside a sink of 19.75, whose 19.75 · √10 = 62.4550 is 62.5 in bfloat16:
    # weight 0.5
    query = torch.full((1, 1, 1, 10), 2.5, dtype=torch.bfloat16)
    sinks_H, seen = torch.tensor([19.75], dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bool)
    out = attention_math.attend_masked(query, query, torch.ones_like(query), seen, Extras(sinks_H=sinks_H))
    assert float(out[0, 0, 0, 0]) == pytest.approx(0.50356, abs=0.002)  # bfloat16's spacing is 0.0039 there


@pytest.mark.parametrize("way", ["varlen", "varlen of torch 2.11", "segments", "short rows whole", "all rows whole"])
def test_packed_logprobs_and_gradients_are_those_of_separate_sequences(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = way == "varlen of torch 2.11"
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop_varlen_of_torch_2_11 if older else loop_varlen)
    monkeypatch.setattr(attention_layout, "SHORT_ROW_TOKENS", {"segments": 0, "all rows whole": 10_000}.get(way, 128))
    monkeypatch.setattr(attention_layout, "SLACK_PAIRS", 0)
    model = tiny.model(0).requires_grad_(True)
    policy = Policy(model, kind="varlen" if way.startswith("varlen") else "mask")
    plain, packed = separate(model, rows(0)), policy(micro_batch(rows(0))).policy_logprobs_N
    assert torch.allclose(plain, packed, atol=1e-5)
    weights = list(model.parameters())
    left, other = (torch.autograd.grad(actual.mean(), weights) for actual in (plain, packed))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(left, other, strict=True))


def small(kind: str, **fields: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    attention_kind = fields.pop("attn_implementation", None)
    chosen = {name: value for name, value in (sizes | fields).items() if value is not None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **chosen)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention_kind).eval()


@functools.cache
def sliding_sinks(head_size: int = 8) -> Any:
    """A gpt-oss with a window of 12 in its first layer, and large sinks."""
    model = small("gpt_oss", num_local_experts=2, num_experts_per_tok=2, sliding_window=12, head_dim=head_size)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


FLASH4 = pytest.param(
    "flash4", marks=pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4")
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("way", "size"), [("varlen", 8), ("varlen", 32), pytest.param(*FLASH4.values, 62, marks=FLASH4.marks)]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda size: small("qwen3", head_dim=size),
        sliding_sinks,
        lambda size: small("mistral", sliding_window=12, head_dim=size),
    ],
    ids=["qwen3", "gpt_oss", "mistral"],
)
def test_variable_length_attention_of_a_gpu_is_that_with_a_mask(
    make: Callable[[int], Any], way: str, size: int
) -> None:
    collected = []
    kinds = (("mask", torch.float32), ("mask", torch.bfloat16), (way, torch.bfloat16))
    for kind, dtype in kinds:
        torch.manual_seed(0)
        model = copy.deepcopy(make(size)).requires_grad_(True).to("cuda", dtype)
        chosen: Any = kind
        logprobs = Policy(model, kind=chosen)(micro_batch(rows(0))).policy_logprobs_N
        gradients = torch.autograd.grad(logprobs.mean(), list(model.parameters()))
        collected.append([logprobs.detach().float().cpu(), *(gradient.float().cpu() for gradient in gradients)])
    query = torch.zeros(1, 4, size, device="cuda", dtype=torch.bfloat16)
    assert variable_length.choose(query, 2, size, windowed=False, flash4=False) == "torch"
    for exact, masked, varlen in zip(*collected, strict=True):
        rounding = (masked - exact).abs().max()  # bfloat16's own error
        assert (varlen - exact).abs().max() <= 2 * rounding + 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("extra", ["none", "sinks"])
@pytest.mark.parametrize("kind", ["mask", "varlen", FLASH4])
@pytest.mark.parametrize("pattern", [CAUSAL, Pattern("window", 12)], ids=lambda left: left.kind)
def test_half_precision_attention_of_a_gpu_is_within_its_rounding(kind: Any, pattern: Pattern, extra: str) -> None:
    segments, generator = micro_batch(rows(0)).segments, torch.Generator().manual_seed(0)
    tokens = int(segments.lengths_K.sum())
    shapes = ((4, tokens, 24), (2, tokens, 24), (2, tokens, 16), (4,))
    halves = [torch.randn(shape, generator=generator).bfloat16().cuda().requires_grad_() for shape in shapes]
    doubles = [half.detach().double().cpu().requires_grad_() for half in halves]
    sinks = extra == "sinks"
    q, k, v, sink = halves
    out = PackedLayout(segments, kind, torch.device("cuda")).attend(
        q[None], k[None], v[None], pattern, Extras(sinks_H=sink if sinks else None)
    )[0]
    q, k, v, sink = doubles
    expected = one_by_one(segments, q, k, v, pattern, Extras(sinks_H=sink if sinks else None))
    used = 4 if sinks else 3
    mine = [out.detach(), *torch.autograd.grad(out.float().square().sum(), halves[:used])]
    its = [expected.detach(), *torch.autograd.grad(expected.square().sum(), doubles[:used])]
    for left, other in zip(mine, its, strict=True):
        # 8 bits of mantissa, some roundings
        assert float((left.double().cpu() - other).norm() / other.norm()) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("size", "is_supported"), [(8, False), (16, False), (32, True), (64, True), (128, True)])
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4")
def test_flash_attention_4_is_right_or_refused(size: int, is_supported: bool) -> None:
    segments, generator = micro_batch(rows(0)).segments, torch.Generator().manual_seed(0)
    shapes = [(heads, int(segments.lengths_K.sum()), size) for heads in (4, 2, 2)]
    halves = [torch.randn(shape, generator=generator).bfloat16().cuda().requires_grad_() for shape in shapes]
    q, k, v = (half[None] for half in halves)
    try:
        out = PackedLayout(segments, "flash4", torch.device("cuda")).attend(q, k, v)[0]
    except CannotPack:
        assert not is_supported
        return
    doubles = [half.detach().double().cpu().requires_grad_() for half in halves]
    query, keys, values = doubles
    expected = one_by_one(segments, query, keys, values, CAUSAL, Extras())
    mine = [out.detach(), *torch.autograd.grad(out.float().square().sum(), halves)]
    its = [expected.detach(), *torch.autograd.grad(expected.square().sum(), doubles)]
    for left, other in zip(mine, its, strict=True):
        assert float((left.double().cpu() - other).norm() / other.norm()) < 0.02


@pytest.mark.parametrize("head_size", [8, 512])
def test_kernels_that_are_asked_for_and_cannot_be_used_are_refused(head_size: int) -> None:
    segments = micro_batch(rows(0)).segments
    given = torch.zeros(1, 2, int(segments.lengths_K.sum()), head_size)
    with pytest.raises(CannotPack, match=f'heads of {head_size} in torch.float32 on cpu.*internal.attention = "auto"'):
        PackedLayout(segments, "flash4", CPU).attend(given, given, given)


def test_keys_are_the_prompts_and_then_the_segments_own() -> None:
    # a prompt of 2, completions of 1 and 2 (computed) tokens, then a prompt of 1
    segments = Segments(*(np.array(numbers) for numbers in ([0, 2, 3, 5], [2, 1, 2, 1], [-1, 0, 0, -1])))
    plain = attention_layout.ragged(segments, CPU)
    assert plain.keys.places.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    ends = plain.ends
    assert (ends.query_ends.tolist(), ends.key_ends.tolist()) == ([0, 2, 3, 5, 6], [0, 2, 5, 9, 10])
    assert (ends.longest_query, ends.longest_key) == (2, 4)
    with_sink = attention_layout.ragged(segments, CPU, first_keys=1)
    assert with_sink.keys.places.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 6]
    assert (with_sink.ends.key_ends.tolist(), with_sink.ends.longest_key) == ([0, 3, 7, 12, 14], 5)


def pack(model: Any) -> None:
    attention.install(model)
    attention.hidden_states(attention.decoder_of(model), micro_batch(rows(0)), "mask")


def attend_with(packed_row: PackedLayout, pattern: Pattern | None = CAUSAL, **others: Any) -> None:
    nothing = torch.zeros(1, 1, 1, 8)
    attention.attend(
        torch.nn.Identity(), nothing, nothing, nothing, attention.PackedMask(packed_row, pattern), **others
    )


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"position_bias": torch.zeros(1)}, "found position_bias"),
        ({"block_indices": torch.zeros(1)}, "found block_indices"),
        ({"is_causal": False}, "found is_causal"),
        ({"dropout": 0.1}, "attention without dropout, found 0.1"),
        ({"sliding_window": 30}, "its sliding window of 30, found one of 139"),
    ],
)
def test_what_attention_is_asked_for_and_packed_rows_do_not_have_is_refused(others: dict[str, Any], said: str) -> None:
    packed_row = PackedLayout(micro_batch(rows(0)).segments, "mask", CPU)
    with pytest.raises(CannotPack, match=said):
        attend_with(packed_row, **others)
    assert packed_row.used == 0


def test_masks_are_read_as_patterns_and_others_are_refused() -> None:
    from transformers.masking_utils import (
        and_masks,
        bidirectional_mask_function,
        causal_mask_function,
        chunked_causal_mask_function,
        or_masks,
        packed_sequence_mask_function,
        sliding_window_causal_mask_function,
    )

    none = torch.zeros(1, dtype=torch.long)
    window, chunk = sliding_window_causal_mask_function(24), chunked_causal_mask_function(24, none)
    assert attention._read(causal_mask_function, None, 100, CPU) == CAUSAL
    assert attention._read(window, 24, 100, CPU) == Pattern("window", 24)
    assert attention._read(chunk, 24, 100, CPU) == Pattern("chunk", 24)
    apart = packed_sequence_mask_function(torch.arange(100)[None] // 5)
    for other, size in (
        (bidirectional_mask_function, None),
        (window, None),
        (window, 23),
        (or_masks(window, bidirectional_mask_function), 24),
        (and_masks(causal_mask_function, apart), None),
    ):
        assert attention._read(other, size, 100, CPU) is None
    with pytest.raises(CannotPack, match="found one with another mask"):
        attend_with(PackedLayout(micro_batch(rows(0)).segments, "mask", CPU), None)


def test_a_model_that_makes_or_reads_its_own_mask_is_refused() -> None:
    seen = attention.PackedMask(PackedLayout(micro_batch(rows(0)).segments, "mask", CPU), CAUSAL)
    mask: Any = seen
    for touch in (
        lambda: mask[:, :, :4],
        lambda: mask.shape,
        lambda: torch.zeros(4) + mask,
        lambda: torch.where(mask, 1, 0),
    ):
        with pytest.raises(CannotPack, match="leaves attention's mask alone"):
            touch()
    with pytest.raises(CannotPack, match="a model that takes positions, found BloomModel"):
        pack(small("bloom", n_head=4, n_layer=1))
    with pytest.raises(CannotPack, match="attends through transformers' attention interface, found FalconModel"):
        pack(small("falcon", num_hidden_layers=1, head_dim=None))
    with pytest.raises(CannotPack, match="leaves attention's mask alone"):
        pack(small("doge", num_hidden_layers=1))


def test_outside_of_a_packed_row_the_model_attends_as_before() -> None:
    for model in (
        sliding_sinks(),
        small("gemma2", attn_logit_softcapping=2.0, sliding_window=12, final_logit_softcapping=None),
    ):
        ids = torch.randint(2, tiny.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
        kept = torch.ones_like(ids)
        kept[1, 30:] = 0
        model.set_attn_implementation("eager")
        before = model(input_ids=ids, attention_mask=kept).logits
        attention.install(model)
        after = model(input_ids=ids, attention_mask=kept).logits
        assert torch.allclose(before[0], after[0], atol=1e-5)
        assert torch.allclose(before[1, :30], after[1, :30], atol=1e-5)
