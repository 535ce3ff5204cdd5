"""The tensors of a policy by the names that a Hugging Face checkpoint of the model class gives them.

::

    module's parameters ─▶ unique()     each once, tied ones too, with the persistent buffers
                        ─▶ published()  without the adapters' factors, each weight with the update to merge into it

Shared by the engine, which gathers partitioned weights first, and by exports from files.
"""

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from services.trainer.model import adapter


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """A tensor that is published."""

    name: str
    tensor: Tensor
    update: adapter.Update | None = None

    @property
    def needed(self) -> tuple[Tensor, ...]:
        """Return the tensors that must be whole for :meth:`merged`."""
        return (self.tensor,) if self.update is None else (self.tensor, *self.update.factors)

    def merged(self) -> Tensor:
        """Return the tensor with its adapter merged in; without an adapter, the tensor itself."""
        return self.tensor.detach() if self.update is None else self.update.merged(self.tensor)


def published(model: nn.Module) -> Iterator[Published]:
    """Yield what is published of ``model``, a Hugging Face causal model perhaps with adapters, in the order of its parameters."""
    updates = adapter.updates(model)
    for name, tensor in unique(model):
        if not adapter.is_factor(name):
            yield Published(adapter.plain_name(name), tensor, updates.get(name))


def unique(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Named parameters and persistent buffers of ``module``; ``named_parameters`` gives a tied one once."""
    yield from module.named_parameters()
    persistent = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)
