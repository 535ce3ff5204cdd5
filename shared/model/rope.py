"""Rotary embeddings with frequencies fixed per run, not per batch (docs/reference/trainer.md).

``dynamic`` is plain up to ``max_position_embeddings``, the replicas' limit; vLLM's differs and is refused, as are
unknown kinds.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.shared.errors import SettingsError

_FIXED = frozenset(("default", "linear", "llama3", "yarn", "proportional", "mrope", "axial"))
"""Frequencies depend only on the config."""


def settle_rope(model: nn.Module, context_tokens: int = 0, *, name: str = "policy.model") -> None:
    """Fix the frequencies of a loaded ``model`` for ``context_tokens`` (0: the model's own).

    Raises SettingsError if a rotary embedding is unknown or depends on the batch.
    """
    for module in model.modules():
        for layer_type, kind in _kinds(module):
            if kind == "longrope":
                _settle_long(module, layer_type, context_tokens, name)
            elif kind == "dynamic":
                _settle_dynamic(module, layer_type, name)
            elif kind not in _FIXED:
                raise SettingsError(
                    f"expected rotary embeddings of a kind that is known ({', '.join(sorted((*_FIXED, 'longrope', 'dynamic')))}), "
                    f"found {kind!r} in {type(module).__name__}: change {name}"
                )


def check_rope_for_vllm(config: Any, name: str = "policy.model") -> None:
    """Raise SettingsError for rotary embeddings whose frequencies differ between vLLM and the trainer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    if any(table.get("rope_type") == "dynamic" and not table.get("alpha") for table in each):
        raise SettingsError(
            'expected rotary embeddings that vLLM computes as transformers does, found rope_type "dynamic", which it scales for short sequences '
            f'too: change rollout.engine to "transformers", or {name}'
        )


def _kinds(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        yield None, rope_type
    elif isinstance(rope_type, Mapping):
        yield from rope_type.items()


def _settle_long(module: Any, layer_type: str | None, context_tokens: int, name: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = _parameters(module, layer_type)
    original = int(parameters["original_max_position_embeddings"])
    context = context_tokens or int(module.config.max_position_embeddings)
    long = context > original
    if long and "long_mscale" in parameters:  # transformers computes these per batch, with short factors
        raise SettingsError(
            f"expected sequences of at most {original} tokens for {type(module).__name__}, whose longer ones transformers computes in another way "
            f"than vLLM, found a context of {context}: lower rollout.vllm.max_model_len or change {name}"
        )
    if long:
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
            module.config, None, seq_len=original + 1, layer_type=layer_type
        )
        _fix(module, layer_type, frequencies)
    elif "long_mscale" not in parameters:
        _fix(module, layer_type, None)


def _settle_dynamic(module: Any, layer_type: str | None, name: str) -> None:
    limit = int(module.config.max_position_embeddings)

    def check(_: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        positions = named["position_ids"] if "position_ids" in named else arguments[1]
        if int(positions.max()) >= limit:
            raise SettingsError(
                f'expected sequences of at most {limit} tokens with rope_type "dynamic", whose frequencies depend on the batch beyond them, '
                f"found one of {int(positions.max()) + 1}: lower sampling.max_new_tokens or rollout.vllm.max_model_len, or change {name}"
            )

    module.register_forward_pre_hook(check, with_kwargs=True)
    _fix(module, layer_type, None)


def _parameters(module: Any, layer_type: str | None) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = module.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _fix(module: Any, layer_type: str | None, frequencies: torch.Tensor | None) -> None:
    """Set ``frequencies`` (None: current ones) as type ``default``, which transformers does not update."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    if frequencies is not None:
        for buffer in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
            present = getattr(module, buffer)
            setattr(module, buffer, frequencies.to(present.device, present.dtype))
    module.rope_type = "default" if layer_type is None else {**module.rope_type, layer_type: "default"}
