"""Bytes of a rank's tensors on its device, by component; the names are those of ``penstock plan``.

A storage counts once, for the first component that holds it. DeepSpeed keeps what it allocates under other names in
each optimizer; those are listed here alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.memory.storages import Storages, tensors_in

_GRADIENTS = ("averaged_gradients", "grad_partitions_flat_buffer")
_MASTER_WEIGHTS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
_FLAT_WEIGHTS = ("bit16_groups_flat", "fp16_partitioned_groups_flat")


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
        "moments": storages.add(tensors_in(getattr(optimizer, "optimizer", optimizer).state)),
        "reduction": storages.add(tensor for bucket in buckets for tensor in tensors_in(bucket.buffer)),
    }


def _weights(parameters: Sequence[Any]) -> Iterator[Tensor]:
    for parameter in parameters:
        yield parameter.data
        if (part := getattr(parameter, "ds_tensor", None)) is not None:
            yield part


def _of(optimizer: Any, names: Sequence[str]) -> Iterator[Tensor]:
    for name in names:
        yield from tensors_in(getattr(optimizer, name, None))
