"""Record the experts of each token of a mixture (:mod:`penstock.shared.model.routes`)."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from penstock.shared.errors import SettingsError
from penstock.shared.model.routes import id_type, mixtures_of

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class RouteRecorder:
    """The experts that the last pass of ``model`` chose, on the engine's thread.

    Raises:
        SettingsError: it has no mixtures of experts.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        mixtures = {int(_LAYER.findall(name)[-1]): module for name, module in mixtures_of(model).items()}
        if not mixtures:
            raise SettingsError(
                f"expected a mixture of experts with trainer.router_replay, found {config.model_type!r}: set it to false"
            )
        self.shape = int(config.num_hidden_layers), int(config.num_experts_per_tok)
        """Layers and experts per token."""
        self.dtype = getattr(torch, id_type(next(iter(mixtures.values())).num_experts).__name__)
        self._chosen: dict[int, Tensor] = {}
        for layer, module in mixtures.items():
            module.register_forward_pre_hook(self._noting(layer))

    def _noting(self, layer: int) -> Any:
        def note(module: nn.Module, given: tuple[Any, ...]) -> None:
            self._chosen[layer] = given[1]

        return note

    def last(self, rows: int) -> Tensor:
        """Return the experts of the last pass, of ``rows`` sequences (rows × tokens × layers × experts per token)."""
        tokens = len(next(iter(self._chosen.values())))
        device = next(iter(self._chosen.values())).device
        routes_TLK = torch.zeros(tokens, *self.shape, dtype=self.dtype, device=device)
        for layer, ids_TK in self._chosen.items():
            routes_TLK[:, layer] = ids_TK.to(self.dtype)
        return routes_TLK.view(rows, -1, *self.shape)
