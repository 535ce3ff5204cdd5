"""What a trained model holds on its device, by component, and which of it is on the host.

The ladder's rungs for the trainer (docs/placement.md)::

    rung 3   optimizer states and master weights    copied at the end of a turn, as many as the next phase needs room for;
                                                    reloaded during the next forward passes
    rung 4   + weights; gradients, which are not needed between steps, are discarded

Works on storages, so it serves every ZeRO stage and torch's own optimizer. Nothing may use a model while it is away.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from penstock.shared.process import memory_timeline
from penstock.shared.settings.placement import OPTIMIZER_RUNG, USABLE_IN_TURNS, moved_and_staying
from penstock.shared.weights.host_copies import HostCopies, storages_of

COMPONENTS = ("weights", "optimizer", "gradients")
FREED = {OPTIMIZER_RUNG: ("optimizer",), 4: COMPONENTS}
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
_SPARE = 0.03
"""Of a device, beside generation."""
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

    def free(self, rung: int, needed_bytes: float | None = None) -> int:
        """Move components to the host down to ``rung``, and return unused memory to the driver.

        Args:
            needed_bytes: at rung 3, whole storages are moved until it is that much, and more while fragments leave the
                driver too little for generation; None: all are.

        Returns:
            the bytes that were moved.
        """
        self.follow()
        before_bytes, moved_bytes = memory_timeline.used_bytes(self._device), 0
        parts = {name: list(part.values()) for name, part in self._components().items()} if rung in FREED else {}
        rest: list[torch.UntypedStorage] = []
        if rung == OPTIMIZER_RUNG and needed_bytes is not None:
            parts["optimizer"], rest = _enough(parts["optimizer"], needed_bytes)
        for name in FREED.get(rung, ()):
            moved_bytes += self._move(name, parts[name])
        self._return_memory(rung)
        while rest and needed_bytes and (lacking := _lacking_bytes(self._device, before_bytes, needed_bytes)) > 0:
            more, rest = _enough(rest, lacking)
            moved_bytes += self._move("optimizer", more)
            self._return_memory(rung)
        return moved_bytes

    def _move(self, name: str, storages: list[torch.UntypedStorage]) -> int:
        moved_bytes = sum(storage.nbytes() for storage in storages)
        if name == "gradients":
            self._copies[name].discard(storages)
        else:
            self._copies[name].offload(storages)
        return moved_bytes

    def _return_memory(self, rung: int) -> None:
        if self._device.type == "cuda" and rung:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Reload what is away; the optimizer's states are complete after :meth:`follow`."""
        for copies in self._copies.values():
            copies.reload()
        for name in ("weights", "gradients"):
            self._copies[name].follow(everywhere=True)

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


def _enough(
    storages: list[torch.UntypedStorage], needed_bytes: float
) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
    """Return the smallest storages, until they have ``needed_bytes``, and the others."""
    moved, staying = moved_and_staying([storage.nbytes() for storage in storages], needed_bytes)
    return [storages[place] for place in moved], [storages[place] for place in staying]


def _lacking_bytes(device: torch.device, before_bytes: float, needed_bytes: float) -> float:
    """Return what the driver lacks for generation, as fragments stay with torch; on a CPU nothing.

    ``before_bytes`` of this process and generation's were ``needed_bytes`` too many for :data:`USABLE_IN_TURNS`.
    """
    if device.type != "cuda":
        return 0.0
    free_bytes, capacity_bytes = torch.cuda.mem_get_info(device)
    generation_bytes = USABLE_IN_TURNS * capacity_bytes + needed_bytes - before_bytes
    return generation_bytes + _SPARE * capacity_bytes - free_bytes


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
