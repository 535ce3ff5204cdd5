"""Sizes of published models by hand, and torch's count of a forward pass."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from penstock.services.trainer.batch.packing import PackedRow
from penstock.services.trainer.model.memory.sizes import measure
from penstock.shared.model.flops import ModelSizes, forward_flops
from tests.support import builders, tiny

QWEN3_30B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    decoder_sparse_step=1, tie_word_embeddings=False,
)  # fmt: skip
MIXTRAL_8X7B = MixtralConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False,
)  # fmt: skip
DEEPSEEK_V3 = DeepseekV3Config(
    vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, n_shared_experts=1, n_routed_experts=256, num_experts_per_tok=8,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=3,
    tie_word_embeddings=False,
)  # fmt: skip
QWEN3_NEXT_80B = Qwen3NextConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=5120, moe_intermediate_size=512, num_hidden_layers=48,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, num_experts=512, num_experts_per_tok=10,
    shared_expert_intermediate_size=512, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, decoder_sparse_step=1, tie_word_embeddings=False,
)  # fmt: skip
GPT_OSS_20B = GptOssConfig(
    vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
    num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
    tie_word_embeddings=False,
)  # fmt: skip
GEMMA3_1B = Gemma3TextConfig(
    vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
    num_key_value_heads=1, head_dim=256, sliding_window=512,
)  # fmt: skip
GEMMA4 = Gemma4TextConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, num_global_key_value_heads=1, head_dim=16, global_head_dim=32, sliding_window=512,
    hidden_size_per_layer_input=0, attention_k_eq_v=False, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)  # fmt: skip

QWEN3_NEXT_LINEAR = 2048 * (2 * 2048 + 2 * 4096) + 2048 * 2 * 32 + 4 * (2 * 2048 + 4096) + 4096 * 2048
QWEN3_NEXT_FULL = 2048 * 2 * 4096 + 2 * 2048 * 512 + 4096 * 2048
MLA = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168


def outline(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # q and o, k and v, router, 8 of 128 experts
        (
            QWEN3_30B,
            ModelSizes(
                48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128 + 8 * 3 * 2048 * 768), 48 * 32 * 128, 151936 * 2048
            ),
        ),
        (
            MIXTRAL_8X7B,
            ModelSizes(
                32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 8 + 2 * 3 * 4096 * 14336), 32 * 32 * 128, 32000 * 4096
            ),
        ),
        # 3 dense layers; 58 with router, 8 experts and a shared one; queries of 192, values of 128
        (
            DEEPSEEK_V3,
            ModelSizes(
                61 * MLA + 3 * 3 * 7168 * 18432 + 58 * (7168 * 256 + 9 * 3 * 7168 * 2048),
                61 * 128 * (192 + 128) // 2,
                129280 * 7168,
            ),
        ),
        # 12 layers attend, 36 are recurrent; 10 experts and a gated shared one
        (
            QWEN3_NEXT_80B,
            ModelSizes(
                12 * QWEN3_NEXT_FULL + 36 * QWEN3_NEXT_LINEAR + 48 * (2048 * 512 + 11 * 3 * 2048 * 512 + 2048),
                12 * 16 * 256,
                151936 * 2048,
            ),
        ),
        (
            GPT_OSS_20B,
            ModelSizes(
                24 * (2 * 2880 * 4096 + 2 * 2880 * 512 + 2880 * 32 + 4 * 3 * 2880 * 2880),
                12 * 64 * 64,
                201088 * 2880,
                ((128, 12 * 64 * 64),),
            ),
        ),
        # tied embeddings; 22 of 26 layers have windows
        (
            GEMMA3_1B,
            ModelSizes(
                26 * (2 * 1152 * 1024 + 2 * 1152 * 256 + 3 * 1152 * 6912), 4 * 4 * 256, 262144 * 1152, ((512, 22 * 4 * 256),)
            ),
        ),
        # heads of 16 in two windowed layers, of 32 in the third
        (
            GEMMA4,
            ModelSizes(
                2 * (2 * 64 * 64 + 2 * 64 * 32) + (2 * 64 * 128 + 2 * 64 * 64) + 3 * 3 * 64 * 96, 4 * 32, 1000 * 64, ((512, 2 * 64),)
            ),
        ),
    ],
    ids=["Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3", "Qwen3-Next-80B-A3B", "gpt-oss-20b", "gemma-3-1b", "gemma4"],
)  # fmt: skip
def test_the_sizes_of_a_published_model_are_those_of_a_hand_count(config: Any, expected: ModelSizes) -> None:
    assert measure(outline(config)) == expected


def test_a_forward_pass_of_a_mixture_costs_what_torch_counts() -> None:
    model = tiny.mixture()
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    tokens = 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None])
    # eager attention also computes masked pairs
    assert counter.get_total_flops() == forward_flops(tokens, tokens * tokens, tokens, measure(model))


def test_experts_that_are_modules_of_their_own_count_by_the_share_that_a_token_goes_through() -> None:
    model = tiny.mixture()
    whole = measure(model)
    for layer in model.model.layers:
        experts = [
            torch.nn.ModuleDict({"up": torch.nn.Linear(32, 32), "down": torch.nn.Linear(16, 32)}) for _ in range(4)
        ]
        layer.mlp.experts = torch.nn.ModuleList(experts)
    assert measure(model) == whole


def test_a_model_that_does_not_say_how_many_experts_a_token_has_counts_all(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.mixture()
    whole = measure(model).linear_weights
    model.config.num_experts_per_tok = 0
    # two layers of four experts of 32 · 32 + 16 · 32 weights, two counted
    assert measure(model).linear_weights == whole + 2 * 2 * (1024 + 512)
    assert "does not give the number of experts per token" in caplog.text


def test_a_window_limits_the_pairs_that_a_layer_with_it_computes() -> None:
    row = PackedRow(np.arange(3, dtype=np.int32), (builders.unlike(0, 3), builders.unlike(1, 2)), (0, 1))
    # within 2 tokens: the prompt's 1 + 2 + 2, then 2 for each of 2 + 1 completion tokens
    assert [row.pairs_within(window) for window in (1, 2, 100)] == [6, 5 + 4 + 2, row.visible_pairs]
    sizes = ModelSizes(linear_weights=0, attention_width=1, output_weights=0, windows=((2, 10),))
    assert row.flops(sizes) == 4.0 * (row.visible_pairs + 11 * 10)
