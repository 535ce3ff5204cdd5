"""Which layers ZeRO stage 3 gathers as a whole, and that this changes no step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.memory import whole_layers
from penstock.services.trainer.model.policy import Policy
from penstock.shared.settings import Settings
from tests.support import model_zoo, tiny
from tests.support.tolerance import GRADIENT, MOVEMENT, moved_apart, smooth_adam
from tests.trainer.model.test_engine import settings

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.filterwarnings("ignore")]

_MODULE_BY_MODULE: dict[str, Any] = {"leaf_module": {"classes": []}}


def policy(model: Any, **parts: Any) -> Policy:
    return Policy(model.requires_grad_(True), **parts).train()


def marked(of: Any, zero_optimization: dict[str, Any] | None = None) -> list[torch.nn.Module]:
    layers = whole_layers.mark(of, zero_optimization or {})
    assert layers == [module for module in of.modules() if getattr(module, "_z3_leaf", False)]
    return layers


@pytest.mark.parametrize("make", [tiny.model, tiny.mixture])
def test_all_decoder_layers_of_a_policy_and_of_a_critic(make: Any) -> None:
    of = policy(make(0))
    assert marked(of) == list(of.model.model.layers)
    trunk = make(0).requires_grad_(True).get_decoder()
    assert marked(Critic(trunk, 32).train()) == list(trunk.layers)


def test_none_where_users_say_which() -> None:
    assert not marked(policy(tiny.model(0)), _MODULE_BY_MODULE)
    assert not marked(policy(tiny.model(0)), {"stage3_module_granularity_threshold": 1000})


def test_none_of_sequences_one_by_one_which_call_a_layer_once_for_each() -> None:
    assert not marked(policy(tiny.model(0), packing="sequences"))


def test_none_of_which_a_part_is_not_trained() -> None:
    lora = Settings.model_validate({"policy": {"lora": {"rank": 4}}}).policy
    assert not marked(Policy(adapter.add(tiny.model(0).requires_grad_(True), lora)).train())
    model = tiny.model(0).requires_grad_(True)
    model.model.layers[1].mlp.up_proj.requires_grad_(False)
    assert marked(Policy(model).train()) == [model.model.layers[0]]


def test_none_on_inputs_without_gradients() -> None:
    model = tiny.model(0).requires_grad_(True)
    model.get_input_embeddings().requires_grad_(False)
    assert marked(Policy(model).train()) == [model.model.layers[1]]


def test_none_that_shares_weights() -> None:
    model = tiny.model(0)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert not marked(policy(model))


def test_none_that_is_called_repeatedly(tmp_path: Path) -> None:
    model_zoo.save("hrm_text", tmp_path)
    of = model_zoo.open_policy(tmp_path, model_zoo.groups(model_zoo.SHORT))
    assert of.trunk.packing == "rows"
    assert not marked(of)


def test_none_larger_than_what_is_kept_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(0)
    of = policy(model)
    numbers = sum(weight.numel() for weight in model.model.layers[0].parameters())
    monkeypatch.setattr(whole_layers, "MOST_NUMBERS", numbers - 1)
    assert not marked(of)
    monkeypatch.setattr(whole_layers, "MOST_NUMBERS", numbers)
    assert len(marked(of)) == 2


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3n_text", "zamba2", "mixtral", "dbrx"])
def test_whole_layers_make_the_steps_of_modules_gathered_one_by_one(name: str, tmp_path: Path) -> None:
    model_zoo.save(name, tmp_path)
    whole, single = _two_steps(tmp_path, {}), _two_steps(tmp_path, _MODULE_BY_MODULE)
    assert whole["marked"] > 0
    assert single["marked"] == 0
    assert whole["norms"] == pytest.approx(single["norms"], rel=GRADIENT)
    start = {name: weight.detach() for name, weight in model_zoo.reference(tmp_path).named_parameters()}
    assert moved_apart(whole["weights"], single["weights"], start) < MOVEMENT


def _two_steps(folder: Path, zero_optimization: dict[str, Any]) -> dict[str, Any]:
    """Two steps of two micro-batches each."""
    of = model_zoo.open_policy(folder, model_zoo.groups(model_zoo.LONG))
    partitioned = {"stage3_param_persistence_threshold": 0, **zero_optimization}
    with smooth_adam():
        engine = TrainingEngine(
            of,
            settings(zero_stage=3, gradient_checkpointing=True, deepspeed={"zero_optimization": partitioned}),
            "cpu",
        )
    norms = []
    for _ in range(2):
        for last, shape in enumerate((model_zoo.SHORT, model_zoo.LONG)):
            logprobs_N = engine.forward(micro_batch(model_zoo.groups(shape))).policy_logprobs_N
            weights_N = torch.randn(logprobs_N.shape, generator=torch.Generator().manual_seed(last))
            engine.backward(logprobs_N @ weights_N, last=bool(last))
        norms.append(engine.step(1e-3))
    count = sum(getattr(module, "_z3_leaf", False) for module in of.modules())
    return {"norms": norms, "weights": {name: tensor.clone() for name, tensor in engine.tensors()}, "marked": count}
