"""What a trained model holds on its device, by component, and which of it is on the host.

The ladder's rungs for the trainer (docs/placement.md)::

    rung 3   optimizer states and master weights    copied at the end of a turn, reloaded during the next forward passes
    rung 4   + weights; gradients, which are not needed between steps, are discarded

Works on storages, so it serves every ZeRO stage and torch's own optimizer. Nothing may use a model while it is away.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from shared.weights.host_copies import HostCopies, storages_of

COMPONENTS = ("weights", "optimizer", "gradients")
FREED = {3: ("optimizer",), 4: COMPONENTS}
"""Components that each rung moves to the host; none below."""
_TOLD = {
    "weights": ("the trainer's weights", "set placement.rung to 3 or lower"),
    "optimizer": (
        "the trainer's optimizer states",
        'set placement.rung to 2 or lower, or trainer.optimizer = "adamw_8bit"',
    ),
    "gradients": ("the trainer's gradients", "set placement.rung to 3 or lower"),
}
"""Each component in words, and what to change, if the host has too little memory for it."""
_MASTERS = "fp32_partitioned_groups_flat"
_GRADIENT_BUFFERS = (
    "averaged_gradients",
    "ipg_buckets",
    "grad_partitions_flat_buffer",
)
"""Attributes of DeepSpeed's optimizers; what is in neither stays on the device."""


class Residency:
    """One model and its optimizer; on the training thread."""

    def __init__(self, model: nn.Module, device: torch.device, optimizer: object | None = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._copies = {name: HostCopies(device, *_TOLD[name]) for name in COMPONENTS}

    def memory(self) -> dict[str, float]:
        """Return bytes by component when resident; call it while they are."""
        sizes = {name: sum(storage.nbytes() for storage in part.values()) for name, part in self._components().items()}
        return {name: float(nbytes) for name, nbytes in sizes.items()}

    def free(self, rung: int) -> None:
        """Move components to the host down to ``rung``, and return unused memory to the driver."""
        parts = self._components() if rung in FREED else {}
        for name in FREED.get(rung, ()):
            if name == "gradients":
                self._copies[name].discard(parts[name].values())
            else:
                self._copies[name].begin(parts[name].values())
                self._copies[name].finish()
        if self._device.type == "cuda" and rung:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Reload what is away; the optimizer's states are complete after :meth:`follow`."""
        for copies in self._copies.values():
            copies.reload()
        for name in ("weights", "gradients"):
            self._copies[name].follow()

    def follow(self) -> None:
        """Let the update wait for the optimizer's states."""
        self._copies["optimizer"].follow()

    def _components(self) -> dict[str, dict[int, torch.UntypedStorage]]:
        """Return storages by component, each in the first that has it."""
        base = getattr(self._optimizer, "optimizer", self._optimizer)
        states = [getattr(base, "state", {}), getattr(base, "param_groups", []), getattr(self._optimizer, _MASTERS, [])]
        buffers = [getattr(self._optimizer, name, None) for name in _GRADIENT_BUFFERS]
        seen: set[int] = set()
        parts = {}
        for name, tensors in (
            ("weights", _parameters(self._model)),
            ("optimizer", _tensors(states)),
            ("gradients", [*_gradients(self._model), *_tensors(buffers)]),
        ):
            storages = storages_of(tensors, self._device)
            parts[name] = {key: storage for key, storage in storages.items() if key not in seen}
            seen |= storages.keys()
        return parts


def _parameters(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):  # this rank's part, at ZeRO stage 3
            yield parameter.ds_tensor


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def _tensors(value: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in containers, and in data classes."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[object] = ()
    if isinstance(value, Tensor):
        yield value
        inner = [value.grad] if value.is_leaf else ()
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        inner = list(value)
    elif dataclasses.is_dataclass(value):
        inner = list(vars(value).values())
    for item in inner:
        yield from _tensors(item, seen)
