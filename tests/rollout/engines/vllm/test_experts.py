"""Fused experts: only those that vLLM leaves as they were loaded are written by a plan."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.services.rollout.engines.vllm.swap.experts import changed


class FusedMoEExperts:
    """Named as vLLM's."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing."""


class Kernel(FusedMoEExperts):
    pass


class Packing(FusedMoEExperts):
    def process_weights_after_loading(self, layer: Any) -> None:
        """Be another than vLLM's."""


class Method:
    """Processes experts by ``process``, as vLLM's method for unquantized experts does."""

    def __init__(self, process: Any, backend: str = "TRITON") -> None:
        self.unquantized_backend = SimpleNamespace(name=backend)
        self.moe_kernel: Any = SimpleNamespace(fused_experts=Kernel())
        self._process = process

    def process_weights_after_loading(self, layer: Any) -> None:
        self._process(layer)


def layer_of(process: Any, backend: str = "TRITON", *, balanced: bool = False) -> Any:
    layer: Any = nn.Module()
    layer.w13_weight = nn.Parameter(torch.arange(24.0).reshape(2, 4, 3), requires_grad=False)
    layer.w2_weight = nn.Parameter(torch.arange(12.0).reshape(2, 3, 2), requires_grad=False)
    layer.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(enable_eplb=balanced))
    layer.quant_method = Method(process, backend)
    return layer


def keep(layer: Any) -> None:
    layer.w13_weight.data.copy_(layer.w13_weight.data)
    layer.w2_weight.data.copy_(layer.w2_weight.data.contiguous())


def swap_halves(layer: Any) -> None:
    gate, up = layer.w13_weight.chunk(2, dim=1)
    layer.w13_weight.data.copy_(torch.cat([up, gate], dim=1))


def zero_padding(layer: Any) -> None:
    layer.w2_weight[:, :, 1:].zero_()


def move_rows(layer: Any) -> None:
    layer.w13_weight[:, :2].copy_(layer.w13_weight[:, 2:])


def keep_another_form(layer: Any) -> None:
    layer.packed = layer.w13_weight.transpose(1, 2).contiguous()


def replace_data(layer: Any) -> None:
    layer.w2_weight.data = torch.zeros(2, 3, 2)


def register_anew(layer: Any) -> None:
    layer.w2_weight = nn.Parameter(layer.w2_weight.data, requires_grad=False)


def swallow_a_refusal(layer: Any) -> None:
    with contextlib.suppress(Exception):
        layer.w13_weight.add_(1)


def fail(layer: Any) -> None:
    raise AttributeError("no such kernel")


def test_experts_that_vllm_leaves_as_they_are_may_be_written() -> None:
    assert changed(layer_of(keep)) == ""
    assert changed(layer_of(keep, "BATCHED_TRITON")) == ""


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (swap_halves, "changed by vLLM after loading, by aten.cat"),
        (zero_padding, "changed by vLLM after loading, by aten.zero_"),
        (move_rows, "changed by vLLM after loading, by aten.copy_"),
        (keep_another_form, "changed by vLLM after loading, by aten.clone"),
        (swallow_a_refusal, "changed by vLLM after loading, by aten.add_"),
        (fail, "cannot process again: AttributeError('no such kernel')"),
        (replace_data, "replaced by vLLM after loading"),
        (register_anew, "replaced by vLLM after loading"),
    ],
)
def test_processing_that_does_more_is_named_and_undone(process: Any, expected: str) -> None:
    layer = layer_of(process)
    held, places = list(layer.parameters()), [parameter.data_ptr() for parameter in layer.parameters()]
    assert expected in changed(layer)
    assert all(now is before for now, before in zip(layer.parameters(), held, strict=True))
    assert [parameter.data_ptr() for parameter in layer.parameters()] == places
    assert torch.equal(layer.w13_weight, torch.arange(24.0).reshape(2, 4, 3))
    assert torch.equal(layer.w2_weight, torch.arange(12.0).reshape(2, 3, 2))


@pytest.mark.parametrize("backend", ["CPU", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "AITER", "XPU"])
def test_backends_with_a_form_of_their_own_are_refused_without_running_them(backend: str) -> None:
    def run(layer: Any) -> None:
        raise AssertionError("it was run")

    assert changed(layer_of(run, backend)) == f"has its experts in the form of vLLM's backend {backend}"


def test_experts_that_move_or_were_not_processed_or_whose_kernel_processes_them_are_refused() -> None:
    assert "moves its experts between ranks" in changed(layer_of(keep, balanced=True))
    layer = layer_of(keep)
    layer.quant_method.moe_kernel.fused_experts = Packing()
    assert changed(layer) == "has experts that Packing processes after loading"
    layer.quant_method.moe_kernel = None
    assert "has no kernel yet" in changed(layer)
