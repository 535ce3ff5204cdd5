"""A model whose layers come to the device one by one computes what it does as a whole, and is left as it was."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.services.trainer.model.memory import layerwise
from penstock.services.trainer.model.policy import Policy, load_model
from penstock.services.trainer.self_test import self_test
from penstock.shared.settings import PolicySettings
from tests.support import model_zoo

CPU = torch.device("cpu")
FAMILIES = ("qwen3", "lfm2", "gemma3", "qwen3_moe", "zamba2")
"""Plain, with state, with two kinds of layers, with experts, with layers inside others."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "SMALL", 100)  # models of tests have no larger weights
    monkeypatch.setattr(self_test, "_ROOM_BYTES", 0)  # other tests may leave less


def opened(folder: Path, dtype: torch.dtype = torch.float32, *, recomputes: bool = False) -> Policy:
    policy = Policy(load_model(PolicySettings(model=str(folder)), dtype))
    if recomputes:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy.train()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "recomputes"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_self_test_layer_by_layer_measures_what_one_of_the_whole_model_does(
    tmp_path: Path, name: str, dtype: torch.dtype, recomputes: bool
) -> None:
    model_zoo.save(name, tmp_path)
    expected = self_test.run(opened(tmp_path, dtype, recomputes=recomputes), "auto")
    policy = opened(tmp_path, dtype, recomputes=recomputes)
    places = {name: tensor.data_ptr() for name, tensor in policy.state_dict().items()}
    with layerwise.by_layer(policy, CPU):
        assert sum(layerwise.is_away(weight) for weight in policy.parameters()) > 5
        actual = self_test.run(policy, "auto")
    assert (actual.gap, actual.widened, actual.packing) == (expected.gap, expected.widened, expected.packing)
    assert {name: tensor.data_ptr() for name, tensor in policy.state_dict().items()} == places
    assert {weight.dtype for weight in policy.parameters()} == {dtype}


def test_a_model_for_which_there_is_room_is_on_the_device_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise, "_fits", lambda model, device: True)
    model_zoo.save("qwen3", tmp_path)
    policy = opened(tmp_path)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    with layerwise.by_layer(policy, CPU):
        assert not any(layerwise.is_away(weight) for weight in policy.parameters())
        assert not policy.model.model.layers[0]._forward_pre_hooks
        assert self_test.run(policy, "rows").gap.gradient < 1e-5
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("recomputes", [False, True])
def test_one_layer_is_on_the_device_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recomputes: bool
) -> None:
    model_zoo.save("qwen3", tmp_path)
    policy = opened(tmp_path, recomputes=recomputes)
    layer = sum(weight.nbytes for weight in policy.model.model.layers[0].parameters() if weight.numel() > 100)
    there = most = 0

    def gone(nbytes: int) -> None:
        nonlocal there
        there -= nbytes

    def copied(self: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        nonlocal there, most
        array = self.host[weight].numpy().copy()  # lives as long as the copy's storage
        weakref.finalize(array, gone, array.nbytes)
        there += array.nbytes
        most = max(most, there)
        return torch.from_numpy(array)

    monkeypatch.setattr(layerwise._Streamed, "_copied", copied)
    with layerwise.by_layer(policy, CPU):
        self_test.run(policy, "rows")
    assert len(policy.model.model.layers) > 1
    assert layer <= most <= 2 * layer, "a layer and what a backward pass needs of another"
    assert there == 0


def test_a_weight_that_is_read_out_of_turn_is_no_number_and_an_error_brings_all_back(tmp_path: Path) -> None:
    model_zoo.save("qwen3", tmp_path)
    policy = opened(tmp_path)
    layer = policy.model.model.layers[0]
    before = layer.mlp.up_proj.weight.clone()

    def broken() -> None:
        with layerwise.by_layer(policy, CPU):
            assert layer.mlp.up_proj.weight.isnan().all()
            assert layer.mlp.up_proj.weight.shape == before.shape
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        broken()
    assert torch.equal(layer.mlp.up_proj.weight, before)
    assert not layer._forward_pre_hooks
