"""Model sizes from config.json alone.

::

    decoder = layers · (attention + MLP or experts)        a token uses `experts per token` of the experts
    kv      = layers · 2 · kv heads · head size            or layers · (kv_lora_rank + rope), with latent attention;
              of layers with a window at most that many tokens are kept, of linear attention none
    saved   = what a layer keeps for its backward pass, per token: its input, both norms, queries, keys, values,
              attention's result, gate, up and their product

Norms and biases are ignored (below 0.1 %).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.shared.errors import SettingsError
from penstock.shared.model.context import STATEFUL, kinds_of, mixer_of, read_config
from penstock.shared.model.flops import ModelSizes
from penstock.shared.settings.trainer import PROVEN

Config = Mapping[str, Any]


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, words: int, **more: Any) -> Config:
    return MappingProxyType({
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": words, **more,
    })  # fmt: skip


SHAPES: Mapping[str, Config] = {
    "0.5b": _llama(896, 4864, 24, 14, 2, 151_936, tie_word_embeddings=True),
    "1.5b": _llama(1536, 8960, 28, 12, 2, 151_936, tie_word_embeddings=True),
    "3b": _llama(2048, 11_008, 36, 16, 2, 151_936, tie_word_embeddings=True),
    "7b": _llama(3584, 18_944, 28, 28, 4, 152_064),
    "8b": _llama(4096, 14_336, 32, 32, 8, 128_256),
    "14b": _llama(5120, 13_824, 48, 40, 8, 152_064),
    "32b": _llama(5120, 27_648, 64, 40, 8, 152_064),
    "70b": _llama(8192, 28_672, 80, 64, 8, 128_256),
    "400b": _llama(16_384, 53_248, 126, 128, 8, 128_256),
    "30b-a3b": _llama(
        2048, 6144, 48, 32, 4, 151_936, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "235b-a22b": _llama(
        4096,
        12_288,
        94,
        64,
        4,
        151_936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
    ),
}
"""Qwen2.5's from 0.5b to 32b but for 8b, Llama 3's 8b, 70b and 400b (405B), Qwen3's 30b-a3b and 235b-a22b."""


_NOT_GATED = ("bloom", "falcon", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2")
"""Models whose MLP has no gate."""


_BYTE = 256
"""Experts whose numbers fit into a byte (penstock.shared.model.routes.id_type)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one model, in numbers rather than bytes."""

    name: str
    layers: int
    hidden: int
    kv_heads: int
    """Ranks among which a token's cache can be divided: 1 with latent attention."""
    head_dim: int
    vocabulary: int
    decoder: int
    """Weights of all layers, with every expert."""
    active: int
    """Of them, those that one token uses."""
    embeddings: int
    inner: int
    """The MLP's width, of the experts that a token uses."""
    attention_width: int
    kv_per_token: int
    """Of layers that keep all tokens."""
    kv_per_windowed_token: int
    window: int
    """In tokens; 0: no layer has one."""
    saved_per_token: int
    """In one layer."""
    linear_sides: int
    """Inputs and outputs of a layer's matrices, which a LoRA adapter of rank 1 has as weights."""
    routes: int
    """Experts that one token is sent to, in all layers."""
    route_bytes: int
    """Of the number of one expert."""
    experts: int = 0
    """Of a layer, that ranks can share (``trainer.expert_parallel``)."""
    chosen: int = 0
    """Of them, those that a token uses."""
    expert_weights: int = 0
    """Weights of all of them, in all layers."""
    mixer: str = ""
    """The class of layers whose state passes along a whole row."""

    @property
    def weights(self) -> int:
        return self.decoder + self.embeddings

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embeddings."""
        return self.embeddings == self.vocabulary * self.hidden

    @property
    def sizes(self) -> ModelSizes:
        """For the cost of a forward pass."""
        return ModelSizes(self.active, self.attention_width, self.vocabulary * self.hidden)


def shape_of(model: str) -> Shape:
    """Return the sizes of a known name (``7b``) or of a folder in Hugging Face form. Raises SettingsError: neither, or
    its config.json has no such sizes.
    """
    known = SHAPES.get(model.lower())
    config = known if known is not None else _cached(model)
    if not config:
        raise SettingsError(
            f"no config.json of a model at {model!r}: set policy.model to a folder in Hugging Face form{_hub_advice(model)}, or "
            f"give penstock plan --model with one of {', '.join(SHAPES)}"
        )
    return from_config(config, model if known is not None else Path(model).name)


def _hub_advice(model: str) -> str:
    return f", run `hf download {model} config.json` if it is a model of the Hub" if model.count("/") == 1 else ""


def from_config(config: Config, name: str) -> Shape:
    fields = {**config, **text} if isinstance(text := config.get("text_config"), Mapping) else config
    try:
        return _shape(fields, name)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SettingsError(
            f"expected the sizes of a decoder in the config.json of {name!r}, found none that can be read ({error!r}): "
            "give --model with a known shape"
        ) from error


def _cached(model: str) -> Config:
    if Path(model).is_dir() or "/" not in model:
        return read_config(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a folder that is not there
        return {}
    return read_config(str(Path(file).parent)) if isinstance(file, str) else {}


def _shape(fields: Config, name: str) -> Shape:
    layers, hidden, heads = fields["num_hidden_layers"], fields["hidden_size"], fields["num_attention_heads"]
    kv_heads = fields.get("num_key_value_heads") or heads
    head = fields.get("head_dim") or hidden // heads
    matrices, kv, width = _attention(fields, hidden, heads, kv_heads, head)
    every, used, inner, copied = _mlp(fields, hidden)
    count, chosen = _experts(fields), fields.get("num_experts_per_tok", 0)
    experts = count if fields.get("model_type", "qwen3_moe") in PROVEN else 0
    inner_of_one = fields.get("moe_intermediate_size") or fields.get("intermediate_size", 0)
    attention = sum(rows * columns for rows, columns in matrices)
    window, windowed, without = _layers_that_forget(fields)
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        kv_heads=1 if fields.get("kv_lora_rank") else kv_heads,
        head_dim=head,
        vocabulary=fields["vocab_size"],
        decoder=layers * (attention + every),
        active=layers * (attention + used),
        embeddings=fields["vocab_size"] * hidden * (1 if fields.get("tie_word_embeddings") else 2),
        inner=inner,
        attention_width=layers * width,
        kv_per_token=(layers - windowed - without) * kv,
        kv_per_windowed_token=windowed * kv,
        window=window,
        saved_per_token=4 * hidden + 2 * width + 2 * kv_heads * head + 3 * inner + copied,
        linear_sides=sum(rows + columns for rows, columns in matrices) + 3 * (hidden + inner),
        routes=layers * chosen if count else 0,
        route_bytes=1 if count <= _BYTE else 2,
        experts=experts,
        chosen=chosen if experts else 0,
        expert_weights=layers * experts * 3 * hidden * inner_of_one,
        mixer=mixer_of(fields),
    )


def _layers_that_forget(fields: Config) -> tuple[int, int, int]:
    """Return the window, and the layers with it and those with a state instead of keys and values, where the config names
    them: others count as keeping every token."""
    layers, pattern = fields["num_hidden_layers"], fields.get("sliding_window_pattern")
    kinds = kinds_of(fields)
    window = (fields.get("sliding_window") or 0) if fields.get("use_sliding_window", True) else 0
    if kinds or not isinstance(pattern, int) or not pattern:
        windowed = kinds.count("sliding_attention")
    else:
        windowed = layers - layers // pattern
    return window, windowed if window else 0, sum(kind in STATEFUL for kind in kinds)


def _attention(
    fields: Config, hidden: int, heads: int, kv_heads: int, head: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Return the matrices, numbers in the cache per token, and the width of attention."""
    latent = fields.get("kv_lora_rank")
    if not latent:
        sides = (heads * head, kv_heads * head, kv_heads * head)
        return [*((hidden, side) for side in sides), (heads * head, hidden)], 2 * kv_heads * head, heads * head
    rope, nope, value = fields["qk_rope_head_dim"], fields["qk_nope_head_dim"], fields["v_head_dim"]
    queries = fields.get("q_lora_rank") or 0
    first = [(hidden, queries), (queries, heads * (rope + nope))] if queries else [(hidden, heads * (rope + nope))]
    rest = [(hidden, latent + rope), (latent, heads * (nope + value)), (heads * value, hidden)]
    return first + rest, latent + rope, heads * (rope + nope + value) // 2


def _experts(fields: Config) -> int:
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(fields[key]) for key in counts if fields.get(key)), 0)


def _mlp(fields: Config, hidden: int) -> tuple[int, int, int, int]:
    """Return a layer's weights, those that a token uses, its inner width, and what transformers keeps more of a token with
    experts: input and output for each chosen one, and the activation by itself."""
    experts = _experts(fields)
    dense = fields.get("intermediate_size") or 4 * hidden
    if not experts:
        matrices = 2 if fields.get("model_type") in _NOT_GATED else 3
        return matrices * hidden * dense, matrices * hidden * dense, dense, 0
    chosen = fields["num_experts_per_tok"]
    each = fields.get("moe_intermediate_size") or dense
    shared = fields.get("shared_expert_intermediate_size") or (fields.get("n_shared_experts") or 0) * each
    router = hidden * experts
    inner = chosen * each + shared
    weights = 3 * hidden * (experts * each + shared) + router
    return weights, 3 * hidden * inner + router, inner, chosen * (2 * hidden + each)
