"""Shapes of random benchmark models: Qwen2.5's, Llama 3's of 70B, mixtures of experts (Qwen3-30B-A3B's), and toys for CPUs."""

from collections.abc import Mapping
from typing import Any

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True,
    },
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "70b": {
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False,
    },
}  # fmt: skip

MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "tiny-mixture": {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "vocab_size": 4096, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
    "30b-a3b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}  # fmt: skip

ALL_SHAPES = {**SHAPES, **MIXTURES}


def config_of(shape: Mapping[str, Any], **more: Any) -> Any:
    """Return a shape's configuration, Qwen2's or Qwen3-MoE's."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    return (Qwen3MoeConfig if "num_experts" in shape else Qwen2Config)(**shape, **more)
