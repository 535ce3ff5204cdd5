"""Tiny configurations of every causal language model in transformers, with variants.

A configuration is a model type and its differences from ``SIZES``. Models have two to four layers, of every kind in
the family.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

VOCABULARY = 256
WINDOW = 24
"""For the variants ``+swa(short)``."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim_model", "embedding_dim"), 64),
    **dict.fromkeys(("intermediate_size", "dim_ff", "ffn_dim", "word_embed_proj_dim_ffn"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "kv_channels"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length"), 1024),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "num_dense_layers"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 16),
    **dict.fromkeys(("index_n_heads", "index_head_dim"), 8),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "qk_rope_head_dim": 8,
    "linear_num_value_heads": 4,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_WINDOWED = {"layer_types": [_SLIDING, _FULL, _SLIDING], "sliding_window": WINDOW}
_RECURRENT = {"num_hidden_layers": 4, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]}
_EQUAL_HEADS = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
_SPARSE = {
    "index_topk": 16,
    "index_n_heads": 32,
}  # with few heads many scores are exactly 0, and ties are random
_GEMMA4 = {"layer_types": [_SLIDING, _SLIDING, _FULL], "num_global_key_value_heads": 1, "sliding_window": 512}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_PHI3_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}


def _rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


FAMILIES: dict[str, dict[str, Any]] = {
    name: {}
    for name in ["apertus", "arcee", "axk1", "bitnet", "bloom", "cohere", "cpmant", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "ernie4_5", "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hy_v3", "hyperclovax", "jais2", "jetmoe", "llama", "longcat_flash", "mamba", "mamba2", "falcon_mamba", "mellum", "mimo_v2_flash", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "openai-gpt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "rwkv", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "xglm", "youtu", "aria_text", "gemma4_unified_text"]
} | {
    "afmoe": {"num_hidden_layers": 4, "num_experts_per_tok": 2, "global_attn_every_n_layers": 2},
    "axk2": _SPARSE,
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "biogpt": {},
    "codegen": {"rotary_dim": 8},
    "cohere2": {"num_hidden_layers": 4},
    "cohere2_moe": {"num_hidden_layers": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32}},
    "deepseek_v32": _SPARSE,
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 8, **_SPARSE},
    "ctrl": {"dff": 96},
    "minicpm3": {"dim_model_base": 32},
    "dots1": {"n_shared_experts": 1},
    "cohere_compass_text": {"num_hidden_layers": 4, "rope_parameters": dict.fromkeys((_SLIDING, _FULL), _PLAIN_ROPE | {"mrope_section": [3, 3, 2]})},
    "xlstm": {"chunk_size": 64, "qk_dim_factor": 1.0},
    "ernie4_5_moe": {"moe_layer_end_index": 2},
    "exaone4": {"layer_types": [_SLIDING, _FULL, _SLIDING]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "laurel_rank": 8,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**_GEMMA4, "global_head_dim": 16},
    "glm_moe_dsa": _SPARSE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 256},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "hrm_text": {"num_hidden_layers": 1, "prefix_lm": False},
    "hunyuan_v1_moe": {"num_experts": 4},
    "hy_v4": _SPARSE,
    "inkling_text": {
        "sliding_window_size": 512,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "local_layer_ids": [0],
        "d_rel": 4,
        "rel_extent": 32,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "kimi_linear": _RECURRENT,
    "laguna": {"layer_types": [_SLIDING, _FULL, _SLIDING], "num_attention_heads_per_layer": [4, 4, 4]},
    "lfm2": {"layer_types": ["conv", _FULL, "conv"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv"]},
    "llama4_text": {"num_hidden_layers": 4, "intermediate_size_mlp": 96},
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minimax": {"layer_types": [_LINEAR, _FULL, _LINEAR]},
    "minimax_m3_vl_text": {"index_topk_blocks": 16, "index_block_size": 128, "rotary_dim": 8, "dense_intermediate_size": 96},
    "nemotron_h": {
        "layers_block_type": [_LINEAR, "moe", _FULL, "mlp", _LINEAR],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {"num_key_value_heads": 4, "linear_num_key_heads": 4, **_RECURRENT},
    "opt": {"word_embed_proj_dim": 64},
    "qwen3_5_moe_text": {**_RECURRENT, **_MROPE},
    "qwen3_5_text": {**_RECURRENT, **_MROPE},
    "qwen3_next": _RECURRENT,
    "qwen4_exp_text": {
        "num_hidden_layers": 4, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 16, "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"lru_width": 64, "num_key_value_heads": 1, "block_types": ["recurrent", "recurrent", "attention"]},
    "zamba": {
        "num_key_value_heads": 4, "num_hidden_layers": 4, "attn_layer_period": 1, "attn_layer_offset": 0,
        "attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "layers_block_type": [_LINEAR, _LINEAR, "hybrid", _LINEAR, "hybrid", _LINEAR], "n_mamba_heads": 8,
        "mamba_headdim": 16, "attention_hidden_size": 128, "attention_head_dim": 32, "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2-scale-none": ("cohere2", {"num_hidden_layers": 4, "logit_scale": 1.0}),
    "deepseek_v3-equal-heads": ("deepseek_v3", _EQUAL_HEADS),
    "falcon_h1-multiplier": ("falcon_h1", {"lm_head_multiplier": 0.4, "key_multiplier": 0.7, "embedding_multiplier": 1.5}),
    "gemma2-no-final-cap": ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": 1.0}),
    "gemma3_text+swa(short)": ("gemma3_text", _WINDOWED),
    "gemma3n_text-nocap": ("gemma3n_text", {"final_logit_softcapping": 1e6}),
    "gemma4_text-real-heads": ("gemma4_text", {"global_head_dim": 32}),
    "gpt_oss+swa(short)": ("gpt_oss", _WINDOWED),
    "granite-scale-1": ("granite", {"logits_scaling": 1.0}),
    "inkling-mup1": ("inkling_text", {"logits_mup_width_multiplier": 1.0}),
    "kimi_linear-equal-heads": ("kimi_linear", _EQUAL_HEADS),
    "llama-dynamic-rope": ("llama", _rope("dynamic", factor=4.0)),
    "llama-linear-rope": ("llama", _rope("linear", factor=4.0)),
    "llama-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama3-rope": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama4_text+chunk(short)": ("llama4_text", {"attention_chunk_size": WINDOW}),
    "llama4_text+temp(short)": ("llama4_text", {"floor_scale": 16}),
    "minimax_m3-sparse": ("minimax_m3_vl_text", {
        "layer_types": [_FULL, "minimax_m3_sparse", "minimax_m3_sparse"], "index_topk_blocks": 2, "index_block_size": 8, "index_head_dim": 16, "index_n_heads": 2
    }),
    "mistral+swa(short)": ("mistral", {"sliding_window": WINDOW}),
    "olmo3+swa(short)": ("olmo3", _WINDOWED),
    "phi3-longrope": ("phi3", {"rope_parameters": _PHI3_ROPE, "original_max_position_embeddings": 64}),
    "qwen2+swa": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}),
    # beyond the 148 of the first survey
    "cohere2+swa(short)": ("cohere2", {"sliding_window": WINDOW}),
    "exaone4+swa(short)": ("exaone4", _WINDOWED),
    "gemma2+swa(short)": ("gemma2", _WINDOWED),
    "gemma4_text+swa(short)": ("gemma4_text", {"global_head_dim": 32, "sliding_window": WINDOW, "final_logit_softcapping": 5.0}),
    "gemma4_text+kv-shared": ("gemma4_text", {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2}),
    "gemma4_text+moe": ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}),
    "granite-scaled": ("granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "phi3+swa(short)": ("phi3", {"sliding_window": WINDOW}),
    "qwen3+swa(short)": ("qwen3", {"use_sliding_window": True, **_WINDOWED}),
    "starcoder2+swa(short)": ("starcoder2", {"sliding_window": WINDOW}),
    "mixtral+swa(short)": ("mixtral", {"sliding_window": WINDOW}),
    "recurrent_gemma+swa(short)": ("recurrent_gemma", {"attention_window_size": WINDOW}),
    "mimo_v2_flash+swa(short)": ("mimo_v2_flash", {"sliding_window": WINDOW}),
}  # fmt: skip

COMPOSITES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("gemma3", "gemma3_text", {}),
    "gemma3+cap": ("gemma3", "gemma3_text", {"final_logit_softcapping": 5.0}),
    "gemma3n": ("gemma3n", "gemma3n_text", {}),
    "gemma4-composite": ("gemma4", "gemma4_text", {"final_logit_softcapping": 5.0}),
    "qwen3_5": ("qwen3_5", "qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text", {}),
}
"""Composite type, text model type, changes to the latter."""

_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 16, "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [], "position_embedding_size": 16,
}  # fmt: skip


def _given(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    latent = {"head_dim": 8, "num_key_value_heads": 4} if "qk_rope_head_dim" in fields else {}
    return {name: value for name, value in {**values, **latent}.items() if name in fields}


def configure(kind: str, changes: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    configuration = CONFIG_MAPPING[kind]
    return configuration(**{**_given(configuration, SIZES), **FAMILIES.get(kind, {}), **changes})


def composite(kind: str, text: str, changes: Mapping[str, Any]) -> Any:
    """Return a vision-language configuration whose text model is tiny with ``changes``."""
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[kind]
    parts: dict[str, Any] = {"text_config": configure(text, changes).to_dict()}
    vision = whole.sub_configs["vision_config"]
    if hasattr(vision, "model_type") and vision.model_type:
        parts["vision_config"] = {"model_type": vision.model_type, **_given(vision, _VISION)}
    for absent in ("audio_config",):
        if absent in whole.sub_configs and kind == "gemma4":
            parts[absent] = None
    return whole(**parts)


def configurations() -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {name: functools.partial(configure, name, {}) for name in FAMILIES}
    made |= {name: functools.partial(configure, kind, changes) for name, (kind, changes) in VARIANTS.items()}
    made |= {name: functools.partial(composite, *parts) for name, parts in COMPOSITES.items()}
    return dict(sorted(made.items()))
