"""Laws of the optimizer: where its states are, and what decays."""

from typing import Literal

import pytest
import torch
from torch import nn

from penstock.services.trainer.model.optimizer import adamw
from penstock.shared.settings import TrainerSettings


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


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_matrices_decay_and_norms_and_biases_do_not(zero_stage: Literal[0, 1, 3]) -> None:
    layers = nn.ModuleList([nn.Embedding(4, 3), nn.Linear(3, 2), nn.LayerNorm(2)])
    decaying = {"0.weight", "1.weight"}
    names = {id(parameter): name for name, parameter in layers.named_parameters()}
    optimizer = adamw(list(layers.parameters()), TrainerSettings(weight_decay=0.1, zero_stage=zero_stage), "cpu")
    for group in optimizer.param_groups:
        assert {names[id(each)] in decaying for each in group["params"]} == {group["weight_decay"] == 0.1}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)
    before = {name: parameter.detach().clone() for name, parameter in layers.named_parameters()}
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, parameter in layers.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == decaying


def test_without_decay_all_weights_are_one_group() -> None:
    layers = nn.Linear(3, 2)
    assert len(adamw(list(layers.parameters()), TrainerSettings(), "cpu").param_groups) == 1
