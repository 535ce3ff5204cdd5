"""Reference Hugging Face models for self-tests, with "eager" attention: only it has soft caps and sinks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from shared.bus.messages import Int32Array

_IMPLEMENTATION = "_attn_implementation"


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
