"""Layers of transformers whose state passes along a whole row, by model type; and why ranks cannot divide rows.

Imports neither torch nor transformers.
"""

from collections.abc import Mapping
from typing import Any

from penstock.shared.errors import SettingsError

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
