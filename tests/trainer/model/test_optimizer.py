"""Laws of the optimizer where its states are in the host's memory."""

import torch
from torch import nn

from services.trainer.model.optimizer import adamw
from shared.settings import TrainerSettings


def test_an_offloaded_optimizer_updates_on_the_host_by_one_kernel_and_as_on_the_device() -> None:
    """DeepSpeed replaces the parameters with parts in the host's memory, in float32."""
    weights = []
    for device in ("cpu", "cuda"):  # the trainer's; the part is in the host's memory
        parameter = nn.Parameter(torch.linspace(-1, 1, 1000))
        optimizer = adamw([parameter], TrainerSettings(offload="optimizer"), device)
        assert optimizer.defaults["fused"] is (device == "cuda")
        for step in range(3):
            parameter.grad = torch.sin(torch.arange(1000.0) + step)
            optimizer.step()
        weights.append(parameter.detach())
    assert torch.allclose(weights[0], weights[1], atol=1e-7)
