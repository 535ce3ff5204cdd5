"""A model without its output layer, on micro-batches packed in rows or sequence by sequence.

::

    rows        a group's prompt once, completions beside it; needs known ``attention`` and ``mixers``
    sequences   each prompt + completion by itself, with transformers' own attention; any causal model, slower

Both return the same hidden states.

Shapes: ``B`` 1, ``T`` tokens of a micro-batch, ``N`` trained tokens, ``D`` hidden size.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import MicroBatch
from penstock.services.trainer.model import experts
from penstock.services.trainer.model.layers import attention, mixers, spans
from penstock.services.trainer.model.layers.attention import CannotPack
from penstock.services.trainer.model.layers.gather import copies, gather_rows
from penstock.services.trainer.model.routing.replay import RouterReplay
from penstock.shared.errors import SettingsError
from penstock.shared.model.context import check_rows

log = logging.getLogger(__name__)

Packing = Literal["auto", "rows", "sequences"]


class Trunk:
    """Computes hidden states of a Hugging Face causal model or trunk. ``packing`` "auto" chooses rows if every
    token-mixing module is known. Raises CannotPack: rows are required, and a module is unknown.
    """

    def __init__(self, model: Any, kind: attention.AttentionKind, packing: Packing) -> None:
        self._model = model
        self._module = attention.decoder_of(model)
        self._kind: attention.AttentionKind = kind
        self._own_attention = str(model.config._attn_implementation)
        self._boundaries: mixers.Boundaries | None = None
        self.replay: RouterReplay | None = None
        self.reason = ""
        """Why ``auto`` did not choose rows; else ""."""
        unknown = "" if packing == "sequences" else mixers.unpackable(self._module)
        if unknown and packing == "rows":
            raise CannotPack(f'{_explain(unknown)}: change trainer.packing to "auto" or "sequences"')
        if unknown:
            self.fall_back(_explain(unknown))
        else:
            self.use("sequences" if packing == "sequences" else "rows")

    def use(self, packing: Literal["rows", "sequences"]) -> None:
        self.packing: Literal["rows", "sequences"] = packing
        if packing == "rows":
            self._boundaries = mixers.install(self._module)
            attention.install(self._model)
        elif self._model.config._attn_implementation == attention.NAME:
            self._model.set_attn_implementation(self._own_attention)

    def fall_back(self, reason: str) -> None:
        self.use("sequences")
        self.reason = f"{reason}; {_COST}"
        log.warning("sequences are not packed", extra={"detail": self.reason})

    @contextlib.contextmanager
    def attending_by(self, kind: attention.AttentionKind) -> Iterator[None]:
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    @contextlib.contextmanager
    def routing_live(self) -> Iterator[None]:
        """Replay no routes within the block."""
        before, self.replay = self.replay, None
        try:
            yield
        finally:
            self.replay = before

    def check_shards(self, ranks: int) -> None:
        """Raise SettingsError if ``ranks`` ranks cannot compute a row together."""
        has_dropout = any(
            ".lora_dropout." in name and getattr(module, "p", 0) for name, module in self._module.named_modules()
        )
        unpacked = self.reason or ('trainer.packing = "sequences"' if self.packing == "sequences" else "")
        check_rows(ranks, mixers.known(self._module), has_dropout=has_dropout, unpacked=unpacked)

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """Return the hidden state that predicts each trained token (N × D)."""
        routes_TLK = None if self.replay is None else self.replay.routes_of(batch, self._device)
        if self.packing == "sequences":
            return self._one_by_one(batch, routes_TLK)
        with self._bounded(batch), self._routed(routes_TLK):
            return attention.hidden_states(self._module, batch, self._kind)

    def _routed(self, routes_TLK: Tensor | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.replay is None else self.replay.use(routes_TLK)

    def _bounded(self, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        if self._boundaries is None:
            return contextlib.nullcontext()
        return self._boundaries.of(batch.segments, self._device, sharded=self._sharded)

    def _one_by_one(self, batch: MicroBatch, routes_TLK: Tensor | None) -> Tensor:
        plan = spans.alone(batch.segments, self._device)
        ids_BT = torch.from_numpy(batch.input_ids_BT).to(self._device)
        more = spans.idle_calls(len(plan.spans), self._device) if self._sharded else 0
        hidden = []
        for span in plan.spans:
            places_W = span.places_GW[0]
            with self._routed(None if routes_TLK is None else routes_TLK[places_W]):
                hidden.append(self._plain(ids_BT[:, places_W]))
        idle = [self._plain(ids_BT[:, :1]) for _ in range(more)]
        hidden_BTD: Tensor = mixers.with_idle(spans.scatter(hidden, plan), idle)
        return gather_rows(hidden_BTD[0], copies(batch.columns_N, batch.tokens, self._device))

    def _plain(self, ids_BT: Tensor) -> Tensor:
        hidden_BTD = getattr(self._module(input_ids=ids_BT, use_cache=False), "last_hidden_state", None)
        if not isinstance(hidden_BTD, Tensor) or hidden_BTD.shape[:2] != ids_BT.shape:
            raise SettingsError(
                f"expected a causal language model, found {type(self._model).__name__}, which gives no hidden state for each token: "
                "change policy.model"
            )
        return hidden_BTD

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._module.parameters()).device
        return device

    @property
    def _sharded(self) -> bool:
        """Whether ranks wait for each other in each layer, and so make equally many calls."""
        parts = any(hasattr(parameter, "ds_id") for parameter in self._module.parameters())
        return parts or bool(experts.layers_of(self._module))


_COST = (
    "each prompt is computed once for each of its completions, so a step with long prompts takes several times as long "
    '(trainer.packing = "sequences" says so without this warning)'
)


def _explain(unknown: str) -> str:
    return f"{unknown} reads other tokens in a way that is not known to keep packed sequences apart"
