"""The optimizer: torch's AdamW, or bitsandbytes' with 8-bit moments, without run-time compilation.

8 bits are blockwise quantized (Dettmers et al. 2022, arXiv:2110.02861); tensors below 4,096 numbers keep 32. With ZeRO
the optimizer sees flat parts of the weights in float32.
"""

from typing import Any

import torch
from torch import nn

from shared.errors import SettingsError
from shared.settings import TrainerSettings


def adamw(parameters: list[nn.Parameter], trainer: TrainerSettings, device: str) -> torch.optim.Optimizer:
    """Loshchilov and Hutter 2019, arXiv:1711.05101."""
    options: dict[str, Any] = {
        "lr": trainer.learning_rate,
        "betas": trainer.adam_betas,
        "weight_decay": trainer.weight_decay,
    }
    if trainer.optimizer == "adamw_8bit":
        made: torch.optim.Optimizer = _import_bitsandbytes().optim.AdamW8bit(parameters, **options)
        return made
    return torch.optim.AdamW(parameters, **options, fused=device == "cuda" and trainer.offload == "none")


def _import_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:  # a CUDA library may be missing
        raise SettingsError(
            f'trainer.optimizer = "adamw_8bit" needs bitsandbytes, which could not be loaded ({error}): install '
            'penstock[adam-8bit], or set it to "adamw"'
        ) from error
    return bitsandbytes
