"""Convert published tensors to ``policy.model``'s checkpoint form, which inference engines read.

Names may differ, or experts be separate where the parameter stacks them::

    published   model.layers.0.mlp.experts.gate_up_proj              (E, 2·i, h)
    checkpoint  model.layers.0.block_sparse_moe.experts.0.w1.weight  (i, h), …0.w3.weight, …1.w1.weight, …

Engine loaders may silently skip other names. transformers' own conversion for saving is used.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.shared.errors import WeightsError
from penstock.shared.process.importing import importing

_INDEX = "model.safetensors.index.json"


class CheckpointForm:
    def __init__(self, source: str, trust_remote_code: bool = False) -> None:
        self._source = source
        self._trusted = trust_remote_code
        self._outline: Any = None
        self._names: set[str] = set()
        self._renamed: dict[str, str] = {}
        self._converted: dict[str, tuple[str, str, Any]] = {}
        self._sizes: dict[str, int] = defaultdict(int)

    def open(self) -> None:
        """Determine each tensor's form, which takes about a second; may raise WeightsError."""
        if self._outline is not None:
            return
        try:
            model = outline(self._source, self._trusted)
        except (OSError, ValueError, ImportError) as error:
            raise WeightsError(
                f"transformers cannot build a causal language model from {self._source!r}: "
                f"{str(error).splitlines()[0]}: change policy.model"
            ) from error
        self._names = checkpoint_names(self._source)
        state = model.state_dict()
        conversions = _conversions(model, loading=bool(self._names))
        if self._names:
            self._renamed, conversions = _loaded(self._names, conversions, model.base_model_prefix, state)
        for name, (group, pattern, converter) in _reversed(state.keys() - self._renamed.keys(), conversions).items():
            if converter is not None:
                self._converted[name] = (group, pattern, converter)
                self._sizes[group] += 1
            elif not self._names:
                self._renamed[name] = group
        self._outline = model

    def outlined(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the published parameters by name, on the meta device; may raise WeightsError."""
        self.open()
        named = self._outline.named_parameters()
        return {name: torch.empty(parameter.shape, dtype=dtype, device="meta") for name, parameter in named}

    def convert(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (published name, value) ``tensors`` in checkpoint form; raises WeightsError if these do not match."""
        self.open()
        waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in tensors:
            if name in self._renamed:
                yield self._renamed[name], tensor
                continue
            if name not in self._converted:
                raise self._unknown(name)
            group = self._converted[name][0]
            waiting[group][name] = tensor
            if len(waiting[group]) == self._sizes[group]:
                yield from self._convert(group, waiting.pop(group))
        if waiting:
            raise WeightsError(f"expected all tensors that make {min(waiting)}, found {sorted(waiting[min(waiting)])}")

    def _convert(self, group: str, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        converter = copy.deepcopy(self._converted[min(tensors)][2])
        for name, tensor in tensors.items():
            converter.add_tensor(group, name, self._converted[name][1], tensor)
        for name, value in converter.convert(group, model=self._outline, config=self._outline.config).items():
            if self._names and name not in self._names:
                raise self._unknown(name)
            yield name, value[0] if isinstance(value, list) else value

    def _unknown(self, name: str) -> WeightsError:
        return WeightsError(
            f"expected tensors that the checkpoint {self._source!r} holds, found {name!r}: its names cannot be traced back to those of "
            "the trained model. Save policy.model once more with this version of transformers (save_pretrained), or change policy.model"
        )


def checkpoint_names(source: str) -> set[str]:
    import json

    from safetensors import safe_open

    folder = _folder(source)
    if folder is None:
        return set()
    if (folder / _INDEX).is_file():
        return set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    names: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def _folder(source: str) -> Path | None:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def outline(source: str, trusted: bool) -> Any:
    with importing():
        from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)


def _conversions(outline: Any, *, loading: bool) -> list[Any]:
    """Return transformers' loading (or saving) conversions; empty before version 5."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return []
    steps = get_model_conversion_mapping(outline, add_legacy=loading)
    return [step for step in steps if loading or not isinstance(step, PrefixChange)]


def _loaded(
    names: set[str], conversions: list[Any], prefix: str, state: dict[str, Any]
) -> tuple[dict[str, str], list[Any]]:
    """Rename ``names`` as loading does; return checkpoint names of unconverted tensors, and the steps used."""
    if not conversions:
        return {name: name for name in names & state.keys()}, []
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [step for step in conversions if isinstance(step, WeightRenaming)]
    converters = [step for step in conversions if isinstance(step, WeightConverter)]
    renamed: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):
        own, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if own not in state and name in state:
            own, pattern = rename_source_key(name, [], [], prefix, state)
        if own in state and pattern is None:
            renamed[own] = name
    return renamed, [step for step in conversions if step.was_used()]


def _reversed(names: Iterable[str], conversions: list[Any]) -> dict[str, tuple[str, str, Any]]:
    """Return by name: the first saved name, its pattern, and its converter, if any."""
    if not conversions:
        return {name: (name, "", None) for name in names}
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    steps = [step.reverse_transform() for step in conversions[::-1]]
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    saved_as: dict[str, tuple[str, str, Any]] = {}
    for name in sorted(names, key=dot_natural_key):
        group, pattern = rename_source_key(name, renamings, converters, reverse=True)
        saved_as[name] = (group, pattern or "", by_pattern.get(pattern))
    return saved_as
