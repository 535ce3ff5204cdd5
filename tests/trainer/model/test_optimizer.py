"""Laws of the optimizer where its states are in the host's memory."""

import torch
from torch import nn

from services.trainer.model.optimizer import adamw, rounding
from shared.settings import TrainerSettings, loads


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


def test_many_micro_batches_whose_gradients_are_added_in_bfloat16_are_told() -> None:
    """512 that are alike give half their sum (DeepSpeed 0.19 at ZeRO 1, 2 and 3)."""

    def told(micro_batches: int, *flags: str) -> str:
        return rounding(micro_batches, loads("", "test", flags, environment={}))

    half = "--policy.dtype=bfloat16"
    assert told(64, half) == told(1000, "--policy.dtype=float32") == ""
    assert "of 65 micro-batches" in told(65, half)
    setting = ["--trainer.zero_stage=2", '--trainer.deepspeed={data_types = {grad_accum_dtype = "fp32"}}']
    assert told(1000, half, *setting) == ""
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(512):
        total += 1
    assert total == 256
