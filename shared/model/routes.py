"""Routes: the experts that each token of a sample went to when it was sampled, as bytes on a replica's shelf.

Of a prompt of 2 tokens and a completion of 3, the routes are those of the first 4 tokens, as the last one was drawn but
not read; vLLM records those of the last 3 of them alone, whose reading gave the completion's logprobs. Each has the ids
of K experts in each of the decoder's L layers; those of layers that are no mixtures are not read. One byte an id, two
with more than 256 experts, in the order of the array: 384 B a token of a model with 48 layers and 8 experts a token.

Shapes: ``P`` tokens of prompt and completion but the last, ``L`` layers, ``K`` experts per token.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

RouteArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
_SMALL = 256


def id_type(experts: int) -> type[np.uint8] | type[np.uint16]:
    """Return the number type of ids below ``experts``."""
    return np.uint8 if experts <= _SMALL else np.uint16


def mixtures_of(model: Any) -> dict[str, Any]:
    """Return the modules of a transformers model that hold a layer's experts and are called with each token's, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate")}


def unpack(payload: bytes, tokens: tuple[int, int], layers: int, top_k: int, experts: int) -> RouteArray:
    """Return routes (P × L × K) of ``tokens``: of all, or the last ones that gave the completion.

    Raises:
        ValueError: they are not as many.
    """
    kind: Any = np.dtype(id_type(experts))
    sizes = {count * layers * top_k * kind.itemsize for count in tokens}
    if len(payload) not in sizes:
        expected = " or ".join(f"{size:,}" for size in sorted(sizes))
        raise ValueError(f"expected {expected} bytes of routes, found {len(payload):,}")
    routes: RouteArray = np.frombuffer(payload, dtype=kind).reshape(-1, layers, top_k)
    return routes


def check(routes_PLK: RouteArray, experts: int) -> None:  # noqa: N803 (shapes)
    """Raise ValueError unless each token has K different experts below ``experts`` in each of the layers."""
    ascending = np.sort(routes_PLK, axis=2)
    if ascending.size and (int(ascending.max()) >= experts or (ascending[..., 1:] == ascending[..., :-1]).any()):
        raise ValueError(f"expected different experts of {experts} in each layer, found others")
