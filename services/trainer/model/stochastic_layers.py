"""Train a model as the function that generated: without dropout, layer drop or random routing.

A policy's logprobs are compared with those of its replicas, which run in eval mode. So the modules of a model stay in eval mode while it
trains, with two exceptions: the dropout of LoRA adapters, which a setting asks for, and layers under gradient checkpointing,
which transformers computes again only where they are in training mode. Those leave it while their own forward pass runs.
"""

from typing import Any

from torch import nn

_LORA_DROPOUT = ".lora_dropout."
_HOOKED = "_penstock_without_noise"


def train_without_noise(model: nn.Module, mode: bool) -> None:
    """Put ``model`` into eval mode; with ``mode``, all but LoRA's dropout and the outside of checkpointed layers.

    Args:
        model: a Hugging Face model or its trunk, wrapped by LoRA or not.
        mode: whether it is about to train.
    """
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
    """Let ``layer`` be in eval mode from the start of its forward pass to its end, the repeated one included."""
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
