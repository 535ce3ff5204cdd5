"""Free the embedded engine's memory for training, rung by rung, and take it back.

::

    rung 0   decoding pauses         resume: the next decoding step
    rung 1   + KV cache dropped      resume: one forward pass over prompts and tokens so far
    rung 2   + weights dropped       resume: a version is received and swapped in first
"""

from collections.abc import Iterable

import torch

from penstock.services.rollout.engines.transformers.loading import OpenedModel
from penstock.services.rollout.engines.transformers.shadow import Shadow
from penstock.shared.process import memory_timeline
from penstock.shared.process.memory_timeline import Held

_NAMES = {"weights": "weights", "shadow": "shadow", "kv_cache": "key-value cache"}


class Ladder:
    """What one engine holds in memory; on its thread."""

    def __init__(self, opened: OpenedModel, shadow: Shadow) -> None:
        self._shadow = shadow
        self._device = opened.device
        self._parameters = [opened.parameters[name] for name in sorted(opened.required)]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self.is_paused = self.is_empty = False
        """Whether decoding is paused, and whether there are no weights."""
        self.memory: dict[str, float] = {}
        """Bytes held by component, at the last change."""
        self.held: Held | None = None
        """The same for the memory timeline."""
        self._place = memory_timeline.place_of(opened.device)

    @property
    def is_away(self) -> bool:
        """Whether the model cannot compute."""
        return self.is_paused or self.is_empty

    def drop_weights(self) -> None:
        """Free the weights and their second copy."""
        self._shadow.drop()
        for parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)
        self.is_empty = True

    def return_memory(self) -> None:
        """Return what was dropped to the driver, for other processes; torch would keep it."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self) -> None:
        """Take the memory back; if the weights were dropped, a swap fills it."""
        self.is_paused = False
        if not self.is_empty:
            return
        with torch.inference_mode(mode=False):
            for parameter, shape in zip(self._parameters, self._shapes, strict=True):
                parameter.data = parameter.data.new_empty(shape)

    def measure(self, cache: object | None) -> None:
        """Note the bytes of each component, and the device's."""
        held = {
            "weights": sum(parameter.nbytes for parameter in self._parameters),
            "shadow": self._shadow.nbytes,
            "kv_cache": sum(tensor.untyped_storage().nbytes() for tensor in _tensors(cache)),
            "capacity": self._capacity(),
        }
        self.memory = {component: float(nbytes) for component, nbytes in held.items()}
        named = {_NAMES[component]: nbytes for component, nbytes in self.memory.items() if component in _NAMES}
        self.held = Held(self._place, named, memory_timeline.used_bytes(self._parameters[0].device))

    def _capacity(self) -> int:
        device = self._parameters[0].device
        return int(torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else memory_timeline.host_bytes()[0])


def _tensors(cache: object | None) -> Iterable[torch.Tensor]:
    """Return a cache's tensors, of every layer; the storage of each may have room for more tokens."""
    for layer in getattr(cache, "layers", ()):
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor):
                yield value
