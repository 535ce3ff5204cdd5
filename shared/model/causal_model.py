"""Load a Hugging Face causal language model, or refuse it: transformers would draw what its checkpoint lacks at random.

Self-tests compare with such a model with "eager" attention: only it has soft caps and sinks.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.shared.bus.messages import Int32Array
from penstock.shared.errors import SettingsError
from penstock.shared.process.importing import importing

if TYPE_CHECKING:
    import torch

_LONGEST = 300
"""Characters of a library's sentence: transformers lists all classes that it knows."""
_NAMED = 3
_IMPLEMENTATION = "_attn_implementation"


def load_causal_model(
    setting: str, source: str, dtype: "torch.dtype", *, trust_remote_code: bool = False, needs_output: bool = True
) -> Any:
    """Return the model in ``source``, as ``setting`` names it. Without ``needs_output`` its output layer may be missing.

    Raises:
        SettingsError: it does not load, or its checkpoint lacks tensors or has some of other shapes.
    """
    with importing():
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

    logging.disable_progress_bar()
    unusable = (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except unusable as error:
        raise SettingsError(
            f"could not load a Hugging Face causal model from {source!r}: {_lines(error)}: change {setting}"
        ) from error
    optional = set() if needs_output else _output_names(model)
    check_loaded(setting, source, {name: loaded[name] for name in ("missing_keys", "mismatched_keys")}, optional)
    return model


def check_loaded(setting: str, source: str, loaded: dict[str, Any], optional: Sequence[str] | set[str] = ()) -> None:
    """Raise SettingsError, from transformers' loading info, unless a checkpoint had every tensor of the model, tied ones once."""
    missing = sorted(set(loaded["missing_keys"]) - set(optional))
    if missing:
        raise SettingsError(
            f"expected all tensors of the model in {source!r}, but its weights lack {_listed(missing)}, which would be random: save "
            f"the whole model, under the names of its architecture, or change {setting}"
        )
    others = sorted(key if isinstance(key, str) else str(key[0]) for key in loaded["mismatched_keys"])
    if others:
        raise SettingsError(
            f"expected tensors of the shapes that config.json in {source!r} describes, found others for {_listed(others)}: save model "
            f"and config.json together, or change {setting}"
        )


def _output_names(model: Any) -> set[str]:
    output = model.get_output_embeddings()
    return {
        f"{name}.{part}" for name, module in model.named_modules() if module is output for part in ("weight", "bias")
    }


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _lines(error: BaseException) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST].rpartition(' ')[0]} …"


@contextlib.contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    configurations = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, getattr(config, _IMPLEMENTATION, None)) for config in configurations.values()]
    chosen = [(config, implementation) for config, implementation in before if implementation is not None]
    try:
        for config, _ in chosen:
            setattr(config, _IMPLEMENTATION, "eager")
        yield
    finally:
        for config, implementation in chosen:
            setattr(config, _IMPLEMENTATION, implementation)


def ordinary_ids(config: Any) -> Int32Array:
    """Return token ids without special meanings such as image or padding."""
    special = set[int]()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_id", "_index", "_ids")):
                special.update(
                    token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)
                )
    return np.array(sorted(set(range(config.get_text_config().vocab_size)) - special), dtype=np.int32)
