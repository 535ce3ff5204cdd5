"""The frozen initial policy, as a copy or as the policy without its adapter."""

from collections.abc import Callable

from penstock.services.trainer.batch.packing import MicroBatch
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers.logits import TokenLogprobs

Reference = Callable[[MicroBatch], TokenLogprobs]
"""Returns the initial policy's logprobs of a micro-batch; collective."""


class AdapterOff:
    """Reference of a policy with adapters: the same weights without them."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    def __call__(self, batch: MicroBatch) -> TokenLogprobs:
        with adapter.off(self._engine.policy):
            logprobs: TokenLogprobs = self._engine.evaluate(batch)
            return logprobs
