"""The whole weights in a checkpoint, for export; on the CPU, with the names of the engine's module."""

import contextlib
import sys
from pathlib import Path

import torch
from torch import Tensor

from penstock.services.trainer.model.saving.ranges import joined


def read(folder: Path, zero_stage: int, expert_parallel: int) -> dict[str, Tensor]:
    """Return the weights and buffers in ``folder``, which DeepSpeed wrote at ``zero_stage``.

    Raises:
        SettingsError: experts were divided, and a file does not say what it holds.
    """
    if expert_parallel == 1:
        return _merged(folder) if zero_stage == 3 else _of_rank_0(folder)
    parts = _shapes(folder) if zero_stage == 3 else _of_rank_0(folder)
    return {**parts, **joined(folder, parts)}


def _merged(folder: Path) -> dict[str, Tensor]:
    """Return the weights that all ranks divided at stage 3."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(sys.stderr):
        merged: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    return merged


def _of_rank_0(folder: Path) -> dict[str, Tensor]:
    """Return rank 0's weights: all but the other ranks' experts."""
    path = folder / "mp_rank_00_model_states.pt"
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)["module"]
    return weights


def _shapes(folder: Path) -> dict[str, Tensor]:
    """Return rank 0's weights at stage 3 without content, and its buffers."""
    from deepspeed.utils import zero_to_fp32

    state, *_ = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(str(folder))[:1])
    shapes = {name: shape for group in state.param_shapes for name, shape in group.items()}
    return {**{name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, **state.buffers}
