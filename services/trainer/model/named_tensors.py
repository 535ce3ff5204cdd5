"""The tensors of a policy by their names in a Hugging Face checkpoint.

::

    module's parameters ─▶ unique()     each once, tied ones too, with the persistent buffers
                        ─▶ published()  without the adapters' factors, each weight with the update to merge into it
"""

import dataclasses
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from penstock.services.trainer.model import adapter

_GATHER_BYTES = 256 << 20
"""Bytes of weights gathered at a time at ZeRO stage 3."""


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    name: str
    tensor: Tensor
    update: adapter.Update | None = None

    @property
    def needed(self) -> tuple[Tensor, ...]:
        return (self.tensor,) if self.update is None else (self.tensor, *self.update.factors)

    def merged(self) -> Tensor:
        return self.tensor.detach() if self.update is None else self.update.merged(self.tensor)


def published(model: nn.Module) -> Iterator[Published]:
    updates = adapter.updates(model)
    for name, tensor in unique(model):
        if not adapter.is_factor(name):
            yield Published(adapter.plain_name(name), tensor, updates.get(name))


def unique(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield named parameters, tied ones once, and persistent buffers."""
    yield from module.named_parameters()
    persistent = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def in_groups(parts: Iterable[Published]) -> Iterator[list[Published]]:
    """Yield the parts that are gathered at a time."""
    group: list[Published] = []
    held_bytes = 0
    for part in parts:
        nbytes = sum(getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size() for tensor in part.needed)
        if group and held_bytes + nbytes > _GATHER_BYTES:
            yield group
            group, held_bytes = [], 0
        group.append(part)
        held_bytes += nbytes
    if group:
        yield group
