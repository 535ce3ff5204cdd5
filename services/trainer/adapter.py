"""Low-rank adapters behind one file: the only one that knows peft.

An adapter of rank r beside a linear layer W (out × in) makes it ``W + scale · B · A``, with A (r × in) drawn by lot, B (out × r)
zero at first and ``scale = alpha / r`` (Hu et al. 2021, arXiv:2106.09685). Only A and B are trained. The model stays the class
that it was; peft puts its layers inside, so names change, and this file changes them back::

    model.layers.0.self_attn.q_proj.base_layer.weight        →  model.layers.0.self_attn.q_proj.weight       (W)
    model.layers.0.self_attn.q_proj.lora_A.default.weight    →  base_model.model.⟨…⟩.q_proj.lora_A.weight    (a PEFT file's)

It knows no ZeRO: whoever merges or copies brings whole tensors.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shared.errors import SettingsError
from shared.importing import uncompiled
from shared.settings import LoraSettings, PolicySettings

_NAME = "default"
_FACTOR_A, _FACTOR_B = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_BASE = ".base_layer."


def add(model: Any, settings: PolicySettings, zero_stage: int = 0) -> Any:
    """Return ``model`` with adapters in it, which alone are trained; without a rank, as it is.

    Raises:
        SettingsError: peft is not installed, no layer has the names of ``policy.lora.target_modules``, or at ZeRO stage 3 the
            output layer has: its parts would be gathered once for each chunk of logits, of which ranks have different numbers.
    """
    lora = settings.lora
    if not lora.rank:
        return model
    try:
        with uncompiled():  # it imports bitsandbytes where that is installed
            from peft import get_peft_model
    except ImportError as error:
        raise SettingsError(
            "expected peft for policy.lora.rank > 0, found none: install penstock[trainer] or set it to 0"
        ) from error
    try:
        found = get_peft_model(model, _configuration(settings)).base_model.model
    except ValueError as error:
        raise SettingsError(
            f"expected layers named {lora.target_modules!r} in {settings.model!r}, found: {error}: "
            "change policy.lora.target_modules"
        ) from error
    if zero_stage == 3 and any(found.get_output_embeddings().children()):
        raise SettingsError(
            f"expected adapters beside other layers than the output layer at trainer.zero_stage = 3, found {lora.target_modules!r}: "
            "change policy.lora.target_modules, or trainer.zero_stage"
        )
    return found


def _configuration(settings: PolicySettings) -> Any:
    from peft import LoraConfig

    lora = settings.lora
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=settings.model,
    )


def scale(lora: LoraSettings) -> float:
    """Return how often an adapter counts."""
    return lora.alpha / lora.rank


@contextlib.contextmanager
def off(module: nn.Module) -> Iterator[None]:
    """Make ``module`` the initial policy for the length of the body; its gradients and optimizer see nothing of it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # peft's own enable_adapters would also switch requires_grad, under DeepSpeed
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.endswith((_FACTOR_A, _FACTOR_B))


def plain_name(name: str) -> str:
    """Return the name that a parameter of the base has without adapters."""
    return name.replace(_BASE, ".")


def factors_of(name: str) -> tuple[str, str]:
    """Return the names of A and B that belong to the base's parameter ``name``; a parameter without any has none there."""
    layer = name.removesuffix(f"{_BASE}weight")
    return layer + _FACTOR_A, layer + _FACTOR_B


def merged(weight: Tensor, factor_a: Tensor, factor_b: Tensor, scale: float) -> Tensor:
    """Return ``W + scale · B · A``, computed in float32, in W's number type; W stays as it is."""
    change = scale * (factor_b.detach().float() @ factor_a.detach().float())
    return (weight.detach().float() + change).to(weight.dtype)


def file_name(name: str) -> str:
    """Return what a PEFT file calls the factor ``name``."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


def with_factors(
    weights: Mapping[str, Tensor], factors: Mapping[str, Tensor], lora: LoraSettings
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights``, those of a base by their names, with an adapter's ``factors`` (names of a PEFT file) merged in."""
    for name, weight in weights.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        factor_a, factor_b = (factors.get(f"{layer}.lora_{part}.weight") for part in "AB")
        if factor_a is None or factor_b is None:
            yield name, weight
        else:
            yield name, merged(weight, factor_a, factor_b, scale(lora))


def file_configuration(settings: PolicySettings, factors: Iterable[str]) -> bytes:
    """Return ``adapter_config.json``, with the layers of ``factors`` by name, as inference engines want them."""
    found = {key: value for key, value in _configuration(settings).to_dict().items() if not isinstance(value, set)}
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in factors}
    found |= {"peft_type": "LORA", "inference_mode": True, "target_modules": sorted(layers)}
    return json.dumps(found, indent=1, sort_keys=True, default=str).encode()
