"""What a model's config.json says of sequences: their maximum length, their tokens, and layers whose state passes along a whole
row, by model type and transformers' class. Imports neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.shared.errors import SettingsError

if TYPE_CHECKING:
    from penstock.shared.settings import Settings

MIXERS: Mapping[str, str] = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "minimax": "MiniMaxLightningAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "zamba": "ZambaMambaMixer",
    "zamba2": "Zamba2MambaMixer",
    "zaya": "ZayaCCAProjection",
}
STATEFUL = frozenset({"conv", "linear_attention", "mamba", "recurrent"})
"""Kinds of layers, as configurations name them, that keep a state and no keys and values."""
_KINDS = ("layer_types", "layers_block_type", "block_types")
_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")


def own_context(config: Mapping[str, Any]) -> int:
    """In tokens; 0: not specified."""
    fields = _of_text(config)
    own = next((int(fields[name]) for name in _NAMES if isinstance(fields.get(name), int)), 0)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    factor = rope.get("factor") if isinstance(rope, Mapping) else None
    if not isinstance(rope, Mapping) or not isinstance(factor, (int, float)):
        return own
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "yarn":
        return max(own, int(rope.get("original_max_position_embeddings") or own) * int(factor))
    return int(own * factor) if kind in ("linear", "dynamic") else own


def own_vocabulary(config: Mapping[str, Any]) -> int:
    """Tokens of the model; 0: not specified."""
    own = _of_text(config).get("vocab_size")
    return own if isinstance(own, int) else 0


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def check_context(settings: "Settings") -> None:
    """Raise SettingsError if a one-token prompt and its completion may exceed the model's context, or the one that is set."""
    model, limit = settings.policy.model, settings.rollout.max_model_len
    own, max_new_tokens = own_context(read_config(model)), settings.sampling.max_new_tokens
    context = limit or own
    if settings.kind.generates and context and max_new_tokens >= context:
        of = "rollout.vllm.max_model_len" if limit else f"the context of {model}"
        raise SettingsError(
            f"expected sampling.max_new_tokens below {context} tokens, {of}, so that there is room for a prompt, found {max_new_tokens}: "
            "lower it" + (", or raise rollout.vllm.max_model_len" if limit else ", or change policy.model")
        )
    if limit and own and limit > own:
        raise SettingsError(
            f"expected rollout.vllm.max_model_len within the {own} tokens that {model} reads, found {limit}: lower it, or change policy.model"
        )


def read_config(model: str) -> Mapping[str, Any]:
    """Empty for a hub name. Raises SettingsError: the file is damaged."""
    file = Path(model) / "config.json"
    try:
        config = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"could not read {file} ({error}): copy it again, or change the setting of that model"
        ) from error
    if not isinstance(config, dict):
        raise SettingsError(f"expected a JSON object in {file}, found another value: change the setting of that model")
    return config


def kinds_of(fields: Mapping[str, Any]) -> list[str]:
    """Return the kinds of a model's layers, where its configuration names them."""
    return next((list(fields[name]) for name in _KINDS if fields.get(name)), [])


def mixer_of(fields: Mapping[str, Any]) -> str:
    """Return the class of such layers in a model with this configuration (of its text); "": it is known to have none."""
    kinds = kinds_of(fields)
    has_some = not kinds or not {*STATEFUL, "hybrid"}.isdisjoint(kinds)
    return MIXERS.get(str(fields.get("model_type")), "") if has_some else ""


def check_rows(ranks: int, mixer: str, *, has_dropout: bool, unpacked: str = "") -> None:
    """Raise SettingsError if ``ranks`` ranks cannot compute a row together; ``unpacked``: why rows are not packed."""
    reason = unpacked or (f"{mixer}, whose state passes along the whole row" if mixer else "")
    if has_dropout:
        reason = "policy.lora.dropout, whose noise ranks draw by themselves"
    if reason and ranks > 1:
        raise SettingsError(
            f"expected a model without dropout that mixes tokens in attention alone, in packed rows, with trainer.sequence_parallel = {ranks}, found {reason}: "
            "set trainer.sequence_parallel to 1"
        )
