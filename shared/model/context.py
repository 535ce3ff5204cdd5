"""Maximum sequence lengths. Imports neither torch nor transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.shared.errors import SettingsError

if TYPE_CHECKING:
    from penstock.shared.settings import Settings

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")


def own_context(config: Mapping[str, Any]) -> int:
    """In tokens; 0: not specified."""
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else config
    own = next((int(fields[name]) for name in _NAMES if isinstance(fields.get(name), int)), 0)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    factor = rope.get("factor") if isinstance(rope, Mapping) else None
    if not isinstance(rope, Mapping) or not isinstance(factor, (int, float)):
        return own
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "yarn":
        return max(own, int(rope.get("original_max_position_embeddings") or own) * int(factor))
    return int(own * factor) if kind in ("linear", "dynamic") else own


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
