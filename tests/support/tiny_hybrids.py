"""Tiny random float32 models with recurrent or convolution layers, and one whose layers cannot be packed."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 48
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 16}


def gated_delta_net() -> Any:
    """A Qwen3.5: two gated delta nets and an attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    config = Qwen3_5TextConfig(**_SIZES, **layers, **heads, head_dim=16, rope_parameters=rope)
    return _random(Qwen3_5ForCausalLM, config)


def short_convolution() -> Any:
    """An LFM2: two short convolutions and an attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = ["conv", "full_attention", "conv"]
    return _random(Lfm2ForCausalLM, Lfm2Config(**_SIZES, num_hidden_layers=3, layer_types=layers, block_multiple_of=16))


def mamba2() -> Any:
    """A Bamba: two Mamba-2 layers and an attention."""
    from transformers import BambaConfig, BambaForCausalLM

    return _random(BambaForCausalLM, BambaConfig(**_SIZES, **_MAMBA, num_hidden_layers=3, attn_layer_indices=[1]))


def mamba1() -> Any:
    """A Jamba without experts: Mamba layers, which cannot continue a state, and attention."""
    from transformers import JambaConfig, JambaForCausalLM

    layers = {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    return _random(JambaForCausalLM, JambaConfig(**_SIZES, **layers, num_experts=1, mamba_d_state=8, mamba_dt_rank=4))


def of_its_own() -> Any:
    """A GPT-J, whose attention bypasses transformers' interface."""
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 512}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _random(GPTJForCausalLM, GPTJConfig(vocab_size=VOCABULARY, **sizes, **dropout))


HYBRIDS: dict[str, Callable[[], Any]] = {
    "gated delta net": gated_delta_net,
    "short convolution": short_convolution,
    "Mamba-2": mamba2,
    "Mamba": mamba1,
}


def _random(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = kind(config).float()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_drawn(name, parameter))
    return model


def _drawn(name: str, tensor: Tensor) -> Tensor:
    noise = torch.randn(tensor.shape)
    if tensor.dim() < 2 or name.endswith("A_log"):
        return tensor + 0.2 * noise
    return noise / math.sqrt(tensor[0].numel())
