"""Measure the sizes that determine the cost of a forward pass; also on the meta device or partitioned.

::

    weights per token = matrices of the decoder, embeddings apart
                      + experts · (experts per token / experts)            3-D parameters, or a list of modules
    attention width   = Σ layers  heads · (size of a query + size of a value) / 2      by window, if a layer has one
    output weights    = those of the output layer, tied or not

Recurrences, norms, rotary embeddings, biases and activations (a few percent) are ignored; chunked attention counts as
full.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from penstock.shared.model.flops import ModelSizes

log = logging.getLogger(__name__)

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k",
)  # fmt: skip
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "linear_out")


def measure(model: Any) -> ModelSizes:
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    decoder = model.get_decoder()
    counted = model if isinstance(decoder, nn.Linear) else decoder  # some models' decoder is their head
    weights = sum(count * _active_share(name, shape, config) for name, shape, count in _matrices(counted, output))
    widths: Counter[int] = Counter()
    for _, module in counted.named_modules(remove_duplicate=False):
        width = _attention_width(module, config)
        widths[_window(module, config) if width else 0] += width
    windows = tuple(sorted((window, width) for window, width in widths.items() if window))
    return ModelSizes(round(weights), widths[0], _numel(output.weight), windows)


def _matrices(decoder: nn.Module, output: nn.Module) -> Iterator[tuple[str, tuple[int, ...], int]]:
    for path, module in decoder.named_modules(remove_duplicate=False):
        if module is output or isinstance(module, nn.Embedding):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and len(_shape(parameter)) > 1 and not name.endswith("bias"):
                yield f"{path}.{name}", _shape(parameter), _numel(parameter)


def _active_share(name: str, shape: tuple[int, ...], config: Any) -> float:
    """Return the share of a matrix used per token: below 1 for experts."""
    experts = _setting(config, _EXPERTS)
    of_experts = any(part.endswith("experts") and "shared" not in part for part in name.split("."))
    stacked = len(shape) == 3 and shape[0] == experts and "conv" not in name
    if not of_experts and not stacked:
        return 1.0
    count = shape[0] if len(shape) == 3 else experts
    chosen = _setting(config, _EXPERTS_PER_TOKEN)
    if not count or not chosen:
        log.warning("the model does not give the number of experts per token: all are counted", extra={"weight": name})
        return 1.0
    return min(1.0, chosen / count)


def _setting(config: Any, names: tuple[str, ...]) -> float:
    """Return the first configured of ``names``, averaged over layers, else 0."""
    for holder in (config, getattr(config, "ffn_config", None)):
        for name in names:
            if value := getattr(holder, name, None):
                return float(sum(value) / len(value)) if isinstance(value, list | tuple) else float(value)
    return 0.0


def _attention_width(module: Any, config: Any) -> int:
    output = next((getattr(module, name) for name in _OUTPUTS if hasattr(getattr(module, name, None), "weight")), None)
    if not hasattr(module, "is_causal") and (output is None or not hasattr(module, "num_key_value_groups")):
        return 0
    head = getattr(module, "head_dim", None)
    value = getattr(module, "v_head_dim", None) or head
    heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", 1)
    values = heads * (value or config.hidden_size // heads) if output is None else _shape(output.weight)[-1]
    if value:
        heads = values // value
    query = getattr(module, "qk_head_dim", None) or head
    return int((heads * query if query else values) + values) // 2


def _window(module: Any, config: Any) -> int:
    by_layer = hasattr(module, "sliding_window") or getattr(config, "layer_types", None)
    return int(getattr(module if by_layer else config, "sliding_window", None) or 0)


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))
