"""Published adapters compute what the trainer does, or are refused."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.named_tensors import published
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.phases import Phases
from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.settings import PolicySettings, Settings
from tests.conftest import need_module
from tests.support import tiny
from tests.support.packed import rows
from tests.trainer.algorithm import test_update

LORA = PolicySettings(model="tiny", lora={"rank": 2, "alpha": 8.0})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _peft() -> Iterator[None]:
    need_module("peft", "peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of tied embeddings and of experts
        yield


def mixtral() -> Any:
    config = MixtralConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return MixtralForCausalLM(config).eval().requires_grad_(False)


def gpt_oss() -> Any:
    """Return a model whose experts are stored (experts, in, out)."""
    config = GptOssConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return GptOssForCausalLM(config).eval().requires_grad_(False)


def trained(model: Any) -> Any:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.3)
    return model


def merged(model: Any) -> dict[str, torch.Tensor]:
    return {part.name: part.merged() for part in published(model)}


def assert_merged_as_by_peft(adapted: Any, by_peft: Any, plain: Any) -> None:
    expected, merged_parameters, before = (
        dict(by_peft.named_parameters()),
        merged(adapted),
        dict(plain.named_parameters()),
    )
    assert merged_parameters.keys() == before.keys() == expected.keys()
    assert {name for name in before if not torch.equal(merged_parameters[name], before[name])} >= {
        f"model.layers.{layer}.{weight}"
        for layer in (0, 1)
        for weight in ("self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        if f"model.layers.{layer}.{weight}" in before
    }
    # Reordered sums of products below 10: 1e-5 is a few roundings of float32.
    assert all(torch.allclose(merged_parameters[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.parametrize("model", [tiny.model, tiny.mixture, mixtral])
def test_adapters_of_all_linear_layers_are_merged_as_peft_merges_them(model: Callable[[], Any]) -> None:
    from peft import get_peft_model

    plain = model()
    adapted = trained(adapter.add(model(), LORA))
    by_peft = get_peft_model(model(), copy.deepcopy(adapted.peft_config["default"]))
    own = dict(adapted.named_parameters())
    for name, parameter in by_peft.base_model.model.named_parameters():
        parameter.data.copy_(own[name])
    assert_merged_as_by_peft(adapted, by_peft.merge_and_unload(), plain)


def test_adapters_of_experts_that_are_stored_transposed_are_merged_as_peft_merges_them() -> None:
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    whole = get_peft_model(gpt_oss(), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names))
    adapted = trained(whole.base_model.model)
    transposed = copy.deepcopy(adapted)
    assert_merged_as_by_peft(transposed, whole.merge_and_unload(), gpt_oss())


@pytest.mark.parametrize("model", [tiny.model, tiny.mixture, mixtral])
def test_the_published_weights_have_the_logprobs_that_the_trainer_computes_with_its_adapters(
    model: Callable[[], Any],
) -> None:
    policy = Policy(trained(adapter.add(model(), LORA))).train()
    replica = model()
    initial, batch = Policy(model())(micro_batch(rows(0))).policy_logprobs_N, micro_batch(rows(0))
    replica.load_state_dict(merged(policy.model), strict=False)
    replica.tie_weights()
    with torch.no_grad():
        own, theirs = policy(batch).policy_logprobs_N, Policy(replica)(batch).policy_logprobs_N
    assert (own - initial).abs().max() > 0.5, "the adapters matter"
    assert (own - theirs).abs().max() < 1e-4  # W + BA and Wx + BAx round differently


def engine(zero_stage: int) -> TrainingEngine:
    settings = Settings.model_validate(
        {
            "run": {"id": "mixture", "device": "cpu"},
            "policy": {"dtype": "float32", "lora": {"rank": 2}},
            "sampling": {"max_new_tokens": 8},
            "algorithm": {"groups_per_step": 4},
            "trainer": {
                "learning_rate": 1e-2, "zero_stage": zero_stage, "max_grad_norm": 1e9, "optimizer": "adamw",
                # else stage 3 would keep small weights whole
                "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if zero_stage == 3 else {},
            },
        }
    )  # fmt: skip
    torch.manual_seed(0)
    model = adapter.add(tiny.mixture(), settings.policy, zero_stage)
    training_engine = TrainingEngine(Policy(trained(model)).train(), settings, "cpu")
    measured = Learner(training_engine, settings, Phases()).learn(
        test_update.batch(), test_update.lags(test_update.batch(), 0), 1
    )
    training_engine.measured = measured  # type: ignore[attr-defined]
    return training_engine


@pytest.mark.usefixtures("one_rank")
def test_a_step_with_adapters_of_experts_is_the_same_at_every_zero_stage_and_after_a_resume(tmp_path: Any) -> None:
    engines = [engine(zero_stage) for zero_stage in (0, 1, 2, 3)]
    norms = [actual.measured["grad_norm"] for actual in engines]  # type: ignore[attr-defined]
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)  # sums of the same squares in another order
    shapes = dict(tiny.mixture().named_parameters())
    for actual in engines:
        assert {name: tuple(shape) for name, _, shape in actual.shapes()} == {
            n: tuple(p.shape) for n, p in shapes.items()
        }
    first, other = engines[1], engine(1)
    expected = {name: tensor.clone() for name, tensor in first.factors()}
    first.save(tmp_path)()
    for parameter in other.policy.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    other.load(tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.factors())


def targets(*names: str, **lora: Any) -> PolicySettings:
    settings = {"rank": 2, **({"target_modules": names} if names else {}), **lora}
    return PolicySettings(model="tiny", lora=settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "policy", "options", "reason"),
    [
        (tiny.model, targets("q_proj", "lm_head"), {}, r"lm_head\.lora_A\.default\.weight would be trained, but does not"),
        (tiny.mixture, targets("q_proj", "embed_tokens"), {}, r"embed_tokens\.lora_embedding_A\.default would be trained"),
        (tiny.mixture, targets("q_proj", "lm_head"), {"zero_stage": 3}, r"output layer's adapter .* or trainer\.zero_stage"),
        (tiny.mixture, targets(), {"published_alone": True}, r'set weights\.lora = "merged", or change policy\.lora'),
        (tiny.mixture, targets(dropout=0.1), {}, r"does not work with lora_dropout != 0\.: change policy\.lora\.dropout"),
        (tiny.mixture, targets("nowhere"), {}, r"expected layers named .*nowhere.*change policy\.lora\.target_modules"),
    ],
)  # fmt: skip
def test_adapters_that_could_not_be_published_whole_are_refused_with_the_setting_to_change(
    model: Callable[[], Any], policy: PolicySettings, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        adapter.add(model(), policy, **options)


def test_adapters_of_an_output_layer_with_weights_of_its_own_are_trained_and_published() -> None:
    adapted = trained(adapter.add(tiny.mixture(), targets("q_proj", "lm_head"), zero_stage=2))
    assert not torch.equal(merged(adapted)["lm_head.weight"], tiny.mixture().lm_head.weight)


def test_factors_of_another_adapter_are_refused_by_name_and_shape() -> None:
    adapted = adapter.add(tiny.mixture(), LORA)
    factors = {adapter.file_name(name): p.data for name, p in adapted.named_parameters() if adapter.is_factor(name)}
    name = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    assert factors[name].shape == (16, 32)  # 4 experts of rank 4: gate and up have 2 each
    with pytest.raises(
        PenstockError, match=r"experts\.base_layer\.lora_A\.weight of shape \(16, 32\), found None: policy"
    ):
        adapter.take(adapted, {other: factor for other, factor in factors.items() if other != name})
