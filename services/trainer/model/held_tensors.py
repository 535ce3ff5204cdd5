"""Bytes of a rank's tensors on its device, by component; the names are those of ``penstock plan``.

A storage counts once, for the first component that holds it. DeepSpeed keeps what it allocates under other names in
each optimizer; those are listed here alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.model.engine import TrainingEngine

_GRADIENTS = ("averaged_gradients", "grad_partitions_flat_buffer")
_MASTER_WEIGHTS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
_FLAT_WEIGHTS = ("bit16_groups_flat", "fp16_partitioned_groups_flat")


class Storages:
    """Adds up storages on one device, each once."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._counted: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages that were not counted yet."""
        nbytes = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type != self._kind or storage.data_ptr() in self._counted:
                continue
            self._counted.add(storage.data_ptr())
            nbytes += storage.nbytes()
        return nbytes


def components(
    policy: TrainingEngine,
    critic: TrainingEngine | None = None,
    reference: nn.Module | None = None,
    snapshots: Iterable[Tensor] = (),
) -> dict[str, float]:
    """Return the bytes of all components of this rank that are not empty."""
    storages = Storages(policy.device)
    parts = _engine(policy, storages)
    parts["critic"] = 0 if critic is None else sum(_engine(critic, storages).values())
    parts["reference"] = 0 if reference is None else storages.add(reference.parameters())
    parts["snapshots"] = storages.add(snapshots)
    return {name: float(nbytes) for name, nbytes in parts.items() if nbytes}


def _engine(engine: TrainingEngine, storages: Storages) -> dict[str, int]:
    optimizer, parameters = engine.optimizer, list(engine.policy.parameters())
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    return {
        "weights": storages.add(_weights(parameters)) + storages.add(_of(optimizer, _FLAT_WEIGHTS)),
        "gradients": storages.add(parameter.grad for parameter in parameters if parameter.grad is not None)
        + storages.add(_of(optimizer, _GRADIENTS)),
        "master weights": storages.add(_of(optimizer, _MASTER_WEIGHTS)),
        "moments": storages.add(_tensors(getattr(optimizer, "optimizer", optimizer).state)),
        "reduction": storages.add(tensor for bucket in buckets for tensor in _tensors(bucket.buffer)),
    }


def _weights(parameters: Sequence[Any]) -> Iterator[Tensor]:
    for parameter in parameters:
        yield parameter.data
        if (part := getattr(parameter, "ds_tensor", None)) is not None:
            yield part


def _of(optimizer: Any, names: Sequence[str]) -> Iterator[Tensor]:
    for name in names:
        yield from _tensors(getattr(optimizer, name, None))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
