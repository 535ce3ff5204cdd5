"""Routes: the experts that each token of a sample went to when it was sampled, as bytes on a replica's shelf.

Of a prompt of 2 tokens and a completion of 3, the routes are those of the first 4 tokens, as the last one was drawn but
not read; vLLM records those of the last 3 of them alone, whose reading gave the completion's logprobs. Each has the ids
of K experts in each of the decoder's L layers; those of layers that are no mixtures are not read. One byte an id, two
with more than 256 experts, in the order of the array: 384 B a token of a model with 48 layers and 8 experts a token.

An episode has a byte for each of its turns, in the order of its segments, 1 or 0, and after these the routes of each
turn with 1: of the token before its first one, and of all its own but the last.

Shapes: ``P`` tokens of prompt and completion but the last, ``L`` layers, ``K`` experts per token.
"""

from collections.abc import Sequence
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


def unpack(payload: bytes | memoryview, tokens: tuple[int, int], layers: int, top_k: int, experts: int) -> RouteArray:
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


def join(turns: Sequence[tuple[int, bytes]]) -> bytes:
    """Return an episode's payload, from the number of tokens of each turn and its routes; empty: no turn has any.

    A turn with other bytes a token than most of them has none.
    """
    sizes = [0 if len(payload) % tokens else len(payload) // tokens for tokens, payload in turns]
    token_bytes = max(filter(None, sizes), key=sizes.count, default=0)
    known = [0 < size == token_bytes for size in sizes]
    parts = (payload for (_, payload), is_known in zip(turns, known, strict=True) if is_known)
    return b"".join((bytes(known), *parts)) if any(known) else b""


def split(payload: bytes, turns: Sequence[int]) -> tuple[npt.NDArray[np.bool_], memoryview]:
    """Return which tokens of an episode's turns of ``turns`` tokens have routes, and the payload of these.

    Raises:
        ValueError: it is of another number of turns.
    """
    marks = np.frombuffer(payload[: len(turns)], np.uint8)
    if len(marks) != len(turns) or (marks > 1).any():
        raise ValueError(f"expected 1 or 0 for each of {len(turns)} turns, found others")
    return np.repeat(marks == 1, turns), memoryview(payload)[len(turns) :]


def check(routes_PLK: RouteArray, experts: int) -> None:  # noqa: N803 (shapes)
    """Raise ValueError unless each token has K different experts below ``experts`` in each of the layers."""
    ascending = np.sort(routes_PLK, axis=2)
    if ascending.size and (int(ascending.max()) >= experts or (ascending[..., 1:] == ascending[..., :-1]).any()):
        raise ValueError(f"expected different experts of {experts} in each layer, found others")
