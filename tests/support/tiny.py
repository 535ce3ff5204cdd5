"""A tiny random policy whose weights are large enough that tokens differ."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.services.rollout.engines.transformers.loading import OpenedModel

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"
VOCABULARY = 48
CONTEXT_TOKENS = 512
STOP = 1


def model(seed: int = 0) -> Any:
    """Return a float32 Qwen2 of two layers with tied embeddings."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=STOP,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval().requires_grad_(False)


def mixture(seed: int = 0) -> Any:
    """Return a float32 Qwen3 mixture of four experts, two per token."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=STOP,
    )
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


def opened(of: Any, stop: tuple[int, ...] = (STOP,)) -> OpenedModel:
    return OpenedModel(
        model=of,
        parameters=dict(of.state_dict(keep_vars=True)),
        required=frozenset(name for name, _ in of.named_parameters()),
        device=torch.device("cpu"),
        stop=stop,
        context_tokens=CONTEXT_TOKENS,
        vocabulary=VOCABULARY,
    )


def tokenizer(chat_template: str | None = None) -> Any:
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = chat_template
    return made


def save(folder: Path, seed: int = 0, of: Any = None) -> Path:
    (of or model(seed)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
