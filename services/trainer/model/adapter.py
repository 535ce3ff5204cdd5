"""Low-rank adapters; the only module that uses peft.

An adapter of rank r makes a weight W (out × in) ``W + scale · B · A``: A (r × in) random, B (out × r) zero at first,
``scale = alpha / r`` (Hu et al. 2021, arXiv:2106.09685). peft changes names; :func:`plain_name` restores them::

    model.layers.0.self_attn.q_proj.base_layer.weight        →  model.layers.0.self_attn.q_proj.weight       (W)
    model.layers.0.self_attn.q_proj.lora_A.default.weight    →  base_model.model.⟨…⟩.q_proj.lora_A.weight    (PEFT file)

Mixtures of experts keep E experts in one tensor (E × out × in, or E × in × out). peft nests one wrapper per such
parameter, with A (E·r × in; rows by expert) and B (out × r·E; columns by rank, then expert)::

    ⟨…⟩.experts.base_layer.base_layer.gate_up_proj           →  ⟨…⟩.experts.gate_up_proj                     (W)
    ⟨…⟩.experts.base_layer.lora_A.default.weight                its A
    ⟨…⟩.experts.lora_A.default.weight                           A of down_proj, which the outer wrapper is for

:func:`updates` therefore matches factors to weights by modules. Callers gather ZeRO-partitioned tensors.
"""

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.extras import install_command
from penstock.shared.process.importing import uncompiled
from penstock.shared.settings import PolicySettings

_NAME = "default"
_FACTOR_A, _FACTOR_B = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_WRAPPED = re.compile(r"(\.base_layer)+\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    factor_a: nn.Parameter
    factor_b: nn.Parameter
    scale: float
    """alpha / r."""
    experts: int = 1
    transposed: bool = False
    """Stored as (…, in, out)."""

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.factor_a, self.factor_b

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``W + scale · B · A`` in W's number type, computed in float32."""
        a, b = (factor.detach().float() for factor in self.factors)
        if weight.ndim == 3:
            a = a.reshape(self.experts, -1, a.shape[-1])  # (E, r, in)
            b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)  # (E, out, r)
        change = self.scale * (b @ a)
        return (weight.detach().float() + (change.mT if self.transposed else change)).to(weight.dtype)


def add(model: Any, settings: PolicySettings, zero_stage: int = 0, *, published_alone: bool = False) -> Any:
    """Return ``model`` with adapters, the only trained parameters; unchanged if ``policy.lora.rank`` is 0.

    ``published_alone``: replicas merge the adapter themselves.

    Raises:
        SettingsError: peft is missing, or the adapters cannot be trained or published with these settings.
    """
    lora = settings.lora
    if not lora.rank:
        return model
    try:
        with uncompiled():  # it imports bitsandbytes if installed
            from peft import get_peft_model
    except ImportError as error:
        raise SettingsError(f"policy.lora.rank > 0 needs peft: {install_command('trainer')}, or set it to 0") from error
    try:
        with warnings.catch_warnings():  # peft misses its own pattern of experts' ranks, but does use it
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            adapted = get_peft_model(model, _configuration(settings)).base_model.model
    except ValueError as error:
        setting = "policy.lora.dropout" if "lora_dropout" in str(error) else "policy.lora.target_modules"
        raise SettingsError(
            f"expected layers named {lora.target_modules!r} in {settings.model!r} that adapters can be added to: "
            f"{error}: "
            f"change {setting}"
        ) from error
    if reason := _reason_to_refuse(adapted, zero_stage, published_alone):
        raise SettingsError(f"adapters cannot be trained on {lora.target_modules!r} of {settings.model!r}: {reason}")
    return adapted


def _reason_to_refuse(model: Any, zero_stage: int, published_alone: bool) -> str:
    change = "change policy.lora.target_modules"
    if unpublished := _unpublished(model):
        return f"{unpublished} would be trained, but does not change any weight that is published on its own: {change}"
    if zero_stage == 3 and any(model.get_output_embeddings().children()):
        return (
            "at trainer.zero_stage = 3 the output layer's adapter would be gathered once for each chunk of logits, of which ranks "
            f"have different numbers: {change}, or trainer.zero_stage"
        )
    wrapped = next((name for name, module in model.named_modules() if _wraps_a_parameter(module)), "")
    if wrapped and published_alone:
        return (
            f"adapters of a mixture's experts and routers ({wrapped}) are published to vLLM merged only: set "
            f'weights.lora = "merged", or {change}'
        )
    return ""


def _unpublished(model: Any) -> str:
    """Return a trained parameter that :func:`updates` cannot merge into exactly one weight, else ""."""
    owners = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    own = {name for name, parameter in model.named_parameters() if owners.count(id(parameter)) == 1}
    covered = {id(factor) for name, update in updates(model).items() if name in own for factor in update.factors}
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return next((name for name, parameter in trained if id(parameter) not in covered), "")


def _wraps_a_parameter(module: nn.Module) -> bool:
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(module, ParamWrapper)


def updates(module: nn.Module) -> dict[str, Update]:
    """Return the adapters' changes by parameter names, except those of embeddings and convolutions."""
    if not any(is_factor(name) for name, _ in module.named_parameters()):
        return {}
    from peft.tuners.lora.layer import Linear, ParamWrapper

    changes: dict[str, Update] = {}
    for path, layer in module.named_modules():
        if type(layer) is ParamWrapper:
            stored_in_out = layer._param_ndim == 3 and not layer._did_swap_in_out_features
            name = f"{_base_path(path, layer)}.{layer.parameter_name}"
            changes[name] = _update(layer, layer.num_experts, stored_in_out)
        elif type(layer) is Linear:
            changes[f"{_base_path(path, layer)}.weight"] = _update(layer, 1, layer.fan_in_fan_out)
    return changes


def _base_path(path: str, layer: Any) -> str:
    while hasattr(layer, "base_layer"):
        path, layer = f"{path}.base_layer", layer.base_layer
    return path


def _update(layer: Any, experts: int, transposed: bool) -> Update:
    a, b = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
    return Update(a, b, layer.scaling[_NAME], experts, transposed)


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


@contextlib.contextmanager
def off(module: nn.Module) -> Iterator[None]:
    """Initial policy within the block; gradients and optimizer are unaffected."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # peft's enable_adapters would also switch requires_grad, under DeepSpeed
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.endswith((_FACTOR_A, _FACTOR_B))


def plain_name(name: str) -> str:
    return _WRAPPED.sub(".", name)


def file_name(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


def take(model: nn.Module, factors: Mapping[str, Tensor]) -> None:
    """Copy ``factors`` (PEFT names) into the adapters of ``model``."""
    own = {file_name(name): factor for name, factor in model.named_parameters() if is_factor(name)}
    expected, given = ({name: tuple(tensor.shape) for name, tensor in those.items()} for those in (own, factors))
    if differing := sorted(expected.items() ^ given.items()):
        name = differing[0][0]
        raise PenstockError(
            f"expected the adapter's {name} of shape {expected.get(name)}, found {given.get(name)}: policy.model or "
            f"policy.lora "
            "has changed since the run was started"
        )
    with torch.no_grad():
        for name, factor in own.items():
            factor.copy_(factors[name])


def file_configuration(model: Any) -> bytes:
    from peft.tuners.lora.layer import Linear

    configuration = model.peft_config[_NAME].to_dict()
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is Linear}
    parameters = sorted(configuration["target_parameters"] or ()) or None
    configuration |= {"inference_mode": True, "target_modules": sorted(layers), "target_parameters": parameters}
    configuration = {key: value for key, value in configuration.items() if not isinstance(value, set)}
    return json.dumps(configuration | {"peft_type": "LORA"}, indent=1, sort_keys=True, default=str).encode()
