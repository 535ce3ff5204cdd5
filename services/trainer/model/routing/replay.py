"""Router replay: tokens go to the experts that they went to when they were sampled (Ma et al. 2025, arXiv:2510.11370).

Rounding moves a token that two experts claim almost equally to another one, and its logprob by more than rounding does.
So routers are given the experts of each token, and take their *live* scores at these, with gradients::

    scores of transformers' router ─▶ top k ─▶ weights: normalised, scaled as the family does
                                        │
                     recorded ids ──────┘      −1: the live top k

Only the choice is replaced: ``topk``, and the mask of groups that other tokens keep. Layers that are computed again
route as they did first.

Shapes: ``T`` tokens of a pass, ``L`` mixture layers, ``K`` experts per token, ``E`` experts.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.services.trainer.batch.packing import MicroBatch, RoutedSample
from penstock.services.trainer.batch.segments import Int64Array
from penstock.services.trainer.model.experts import PROVEN
from penstock.shared.errors import SettingsError
from penstock.shared.model import routes
from penstock.shared.model.routes import RouteArray

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class RouterReplay:
    """The routes of the pass that runs, on the training thread."""

    def __init__(self, layers: tuple[int, ...], decoder_layers: int, experts: int, top_k: int) -> None:
        self.layers = layers
        """The places of the mixtures among the decoder's layers."""
        self.decoder_layers, self.experts, self.top_k = decoder_layers, experts, top_k
        self._known: dict[bytes, tuple[RouteArray, Int64Array | slice]] = {}
        """By claim: the routes, and the places of their tokens among the sample's."""
        self._routes_TLK: Tensor | None = None

    def __deepcopy__(self, _: Any) -> "RouterReplay":
        return self

    def take(self, claim: bytes, payload: bytes, positions: int, drawn: int, turns: tuple[int, ...] = ()) -> int:
        """Keep the routes of a sample, of ``positions`` tokens, or the last of them, from which ``drawn`` tokens were drawn, or of
        an episode's ``turns``; return of how many turns, 1 of a completion.

        Raises:
            ValueError: they cannot be this model's.
        """
        if not turns:
            routes_PLK = self._unpacked(payload, (positions, drawn))
            self._known[claim] = routes_PLK, slice(positions - len(routes_PLK), positions)
            return 1
        known_P, rest = routes.split(payload, turns)
        places_P = np.flatnonzero(known_P)
        self._known[claim] = self._unpacked(rest, (len(places_P), len(places_P))), places_P
        return int(known_P[np.cumsum(turns) - 1].sum())

    def _unpacked(self, payload: bytes | memoryview, tokens: tuple[int, int]) -> RouteArray:
        routes_PLK = routes.unpack(payload, tokens, self.decoder_layers, self.top_k, self.experts)[:, self.layers]
        routes.check(routes_PLK, self.experts)
        return routes_PLK

    def forget(self) -> None:
        """Drop all routes."""
        self._known.clear()

    def columns_of(self, sample: RoutedSample) -> Int64Array:
        """Return the places in the row of the tokens whose routes are known, or −1."""
        return sample.columns_P[self._known[sample.claim][1] if sample.claim in self._known else slice(0)]

    def routes_of(self, batch: MicroBatch, device: torch.device) -> Tensor | None:
        """Return the known routes of a pass's tokens (T × L × K, int32), −1 elsewhere; None: all are live."""
        known = [
            (self._known[each.claim][0], self.columns_of(each)) for each in batch.routed if each.claim in self._known
        ]
        if not known:
            return None
        routes_TLK = np.full((batch.input_ids_BT.size, len(self.layers), self.top_k), -1, np.int32)
        for routes_PLK, columns_P in reversed(known):  # a shared prompt has the first sample's
            is_here_P = columns_P >= 0
            routes_TLK[columns_P[is_here_P]] = routes_PLK[is_here_P]
        return torch.from_numpy(routes_TLK).to(device)

    @contextlib.contextmanager
    def use(self, routes_TLK: Tensor | None) -> Iterator[None]:
        """Route by ``routes_TLK`` within the block, also in layers recomputed later; −1, and None: live."""
        before, self._routes_TLK = self._routes_TLK, routes_TLK
        try:
            yield
        finally:
            self._routes_TLK = before

    def routed_layer(self, base: type[nn.Module]) -> type[nn.Module]:
        """Return ``base``, remembering the routes of its first computation for recomputation."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return base.__call__(module, *args, **kwargs, penstock_routes=self._routes_TLK)

        def forward(module: nn.Module, *args: Any, penstock_routes: Tensor | None = None, **kwargs: Any) -> Any:
            with self.use(penstock_routes):
                return base.forward(module, *args, **kwargs)

        return type(base.__name__, (base,), {"__call__": call, "forward": forward, "__module__": base.__module__})

    def routed_router(self, base: type[nn.Module]) -> type[nn.Module]:
        """Return ``base``, routing by the routes of its ``penstock_mixture``."""

        def forward(module: Any, hidden_states: Tensor) -> Any:
            if self._routes_TLK is None:
                return base.forward(module, hidden_states)
            with _Chosen(self._routes_TLK[:, module.penstock_mixture], self.experts) as chosen:
                routed = base.forward(module, hidden_states)
            if chosen.count != 1:
                raise RuntimeError(f"expected one choice of experts in {base.__name__}, found {chosen.count}: a bug")
            return routed

        return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


class _Chosen(TorchFunctionMode):
    """Replaces the choice of K of E experts for each token by ``ids_TK``."""

    def __init__(self, ids_TK: Tensor, experts: int) -> None:
        super().__init__()
        self._ids_TK = ids_TK.long()
        self._whole = (len(ids_TK), experts)
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is Tensor.masked_fill and args[0].shape == self._whole:
            return torch.where(self._ids_TK[:, :1] < 0, result, args[0])
        if function in (torch.topk, Tensor.topk) and args[0].shape == self._whole:
            self.count += 1
            ids_TK = torch.where(self._ids_TK < 0, result.indices, self._ids_TK)
            return args[0].gather(1, ids_TK), ids_TK
        return result


def install(model: Any) -> RouterReplay:
    """Let the routers of ``model`` replay routes; idempotent.

    Raises:
        SettingsError: it has none, or of a family that is not tested.
    """
    if (installed := getattr(model, "_penstock_replay", None)) is not None:
        return installed  # type: ignore[no-any-return]
    from transformers.modeling_layers import GradientCheckpointingLayer

    routers = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Router")}
    family = str(model.config.get_text_config().model_type)
    sizes = {(int(module.num_experts), int(module.top_k)) for module in routers.values()}
    if family not in PROVEN or len(sizes) != 1:
        model_type = f"{family!r}" if routers else f"{family!r}, which is no mixture of experts"
        raise SettingsError(
            f"trainer.router_replay is tested with {', '.join(sorted(PROVEN))}, found {model_type}: set it to false"
        )
    layers = tuple(int(_LAYER.findall(name)[-1]) for name in routers)
    replay = RouterReplay(layers, int(model.config.get_text_config().num_hidden_layers), *sizes.pop())
    routed_router: Any = functools.cache(replay.routed_router)
    routed_layer: Any = functools.cache(replay.routed_layer)
    for place, router in enumerate(routers.values()):
        router.penstock_mixture = place
        router.__class__ = routed_router(type(router))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and not set(routers.values()).isdisjoint(module.modules()):
            module.__class__ = routed_layer(type(module))
    model._penstock_replay = replay
    return replay
