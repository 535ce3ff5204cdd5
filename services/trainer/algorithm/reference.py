"""The reference policy: the frozen initial weights, as a copy or as the policy without its adapter."""

from collections.abc import Callable

from services.trainer.batch.packing import MicroBatch
from services.trainer.model import adapter
from services.trainer.model.engine import TrainingEngine
from services.trainer.model.layers.logits import TokenLogprobs

Reference = Callable[[MicroBatch], TokenLogprobs]
"""Computes the initial policy's logprobs of a micro-batch. Every rank calls it at the same point."""


class AdapterOff:
    """The reference of a policy with adapters: the same weights without them, so no copy is held."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    def __call__(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the initial policy's logprobs of ``batch``'s trained tokens."""
        with adapter.off(self._engine.policy):
            logprobs: TokenLogprobs = self._engine.evaluate(batch)
            return logprobs
