"""Train without dropout, layer drop or random routing.

The policy trains in eval mode, in which replicas generate, except for LoRA's dropout and the outside of checkpointed
layers, which transformers recomputes only in training mode.
"""

from typing import Any

from torch import nn

_LORA_DROPOUT = ".lora_dropout."
_HOOKED = "_penstock_without_noise"


def train_without_noise(model: nn.Module, mode: bool) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.eval()
    if not mode:
        return
    for name, module in model.named_modules():
        if _LORA_DROPOUT in f".{name}.":
            module.training = True
        elif isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
            _leave_training_inside(module)


def _leave_training_inside(layer: nn.Module) -> None:
    """Keep ``layer`` in eval mode during its forward pass, also when repeated."""
    if getattr(layer, _HOOKED, False):
        return
    setattr(layer, _HOOKED, True)
    outside: list[bool] = []

    def enter(module: nn.Module, _: Any) -> None:
        outside.append(module.training)
        module.training = False

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        module.training = outside.pop()

    layer.register_forward_pre_hook(enter, prepend=True)
    layer.register_forward_hook(leave, always_call=True)
