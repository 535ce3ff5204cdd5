"""The optimizer: torch's AdamW, or bitsandbytes' with 8-bit moments, without run-time compilation.

8 bits are blockwise quantized (Dettmers et al. 2022, arXiv:2110.02861); tensors below 4,096 numbers keep 32. With ZeRO
the optimizer sees flat parts of the weights in float32, one per parameter group. At stages 1 and 2 DeepSpeed copies a
group's gradients, flat, then in float32, so a large model has several groups: with one, the copies of 7 billion
gradients need 43 GiB. bitsandbytes counts a tensor's numbers in 32 bits.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from penstock.services.trainer.model import experts
from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_command
from penstock.shared.settings import TrainerSettings
from penstock.shared.settings.trainer import bucket_as_set, reduced_together

_LARGE, GROUP_WEIGHTS = 2**31 - 2**20, 2**30
"""Weights of a model that has several groups, and of each group at most (a larger tensor is a group of its own)."""
_COUNTED = 2**31 - 1


def adamw(parameters: list[nn.Parameter], trainer: TrainerSettings, device: str) -> torch.optim.Optimizer:
    """Loshchilov and Hutter 2019, arXiv:1711.05101; norms, biases and other vectors do not decay, as in transformers."""
    options: dict[str, Any] = {"lr": trainer.learning_rate, "weight_decay": trainer.weight_decay, **_moments(trainer)}
    divided = [each for each in parameters if experts.group_of(each) is not None]
    groups = [*_kinds([each for each in parameters if experts.group_of(each) is None], trainer)]
    groups += [{**group, "moe": True, "name": experts.group_name(divided[0])} for group in _kinds(divided, trainer)]
    if trainer.optimizer == "adamw_8bit":
        made: torch.optim.Optimizer = _import_bitsandbytes().optim.AdamW8bit(groups, **options)
        return made
    return torch.optim.AdamW(groups, **options, fused=device == "cuda")


def _kinds(parameters: Sequence[nn.Parameter], trainer: TrainerSettings) -> Iterator[dict[str, Any]]:
    """Yield groups of parameters that decay, then of others."""
    spared = {each for each in parameters if trainer.weight_decay and len(_shape(each)) < 2}
    yield from _groups([each for each in parameters if each not in spared], trainer.zero_stage)
    others = [each for each in parameters if each in spared]
    yield from ({**group, "weight_decay": 0.0} for group in _groups(others, trainer.zero_stage))


def set_options(optimizer: Any, trainer: TrainerSettings) -> None:
    """Set the run's options in an optimizer that has those of a checkpoint."""
    for group in optimizer.param_groups:
        group.update(_moments(trainer), weight_decay=trainer.weight_decay if group["weight_decay"] else 0.0)


def _moments(trainer: TrainerSettings) -> dict[str, Any]:
    return {"betas": trainer.adam_betas, "eps": trainer.adam_eps}


def bucket_of(parameters: Sequence[nn.Parameter], trainer: TrainerSettings) -> int:
    gradients = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    return reduced_together(gradients, bucket_as_set(trainer.deepspeed))


def _shape(parameter: nn.Parameter) -> Sequence[int]:
    shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)  # whole, at ZeRO stage 3
    return shape


def check_sizes(optimizer: Any, trainer: TrainerSettings) -> None:
    """Refuse what bitsandbytes cannot count, with DeepSpeed's optimizer: it would update a part of the weights only, or
    end the process.
    """
    if trainer.optimizer != "adamw_8bit":
        return
    stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    stepped += getattr(optimizer, "fp32_partitioned_groups_flat", [])  # at ZeRO stage 3
    if (largest := max(tensor.numel() for tensor in stepped)) > _COUNTED:
        raise SettingsError(
            f'trainer.optimizer = "adamw_8bit" updates at most {_COUNTED:,} weights at a time, found {largest:,}: raise '
            'trainer.ranks, lower zero_optimization.sub_group_size in trainer.deepspeed, or set it to "adamw"'
        )


def _groups(parameters: Sequence[nn.Parameter], zero_stage: int) -> Iterator[dict[str, Any]]:
    """Yield parameter groups in order; ZeRO stage 3 has its own, and steps them one after the other."""
    if not parameters:
        return
    if zero_stage == 3 or sum(parameter.numel() for parameter in parameters) <= _LARGE:
        yield {"params": list(parameters)}
        return
    group: list[nn.Parameter] = []
    weights = 0
    for parameter in parameters:
        if group and weights + parameter.numel() > GROUP_WEIGHTS:
            yield {"params": group}
            group, weights = [], 0
        group.append(parameter)
        weights += parameter.numel()
    yield {"params": group}


def _import_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:  # a CUDA library may be missing
        raise SettingsError(
            f'trainer.optimizer = "adamw_8bit" needs bitsandbytes, which could not be loaded ({error}): '
            f'{install_command("adam-8bit")}, or set it to "adamw"'
        ) from error
    return bitsandbytes
