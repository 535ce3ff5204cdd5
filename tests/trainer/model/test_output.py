"""A model's logits, rotary frequencies, context, and training noise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.policy import Policy, check_numbers, load_trunk
from penstock.shared.errors import SettingsError
from penstock.shared.model.causal_model import load_causal_model
from penstock.shared.model.context import check_context, own_context
from penstock.shared.model.logits_transform import LogitsTransform, logits_transform
from penstock.shared.model.rope import check_rope_for_vllm, settle_rope
from penstock.shared.settings import PolicySettings, load
from tests.support import tiny
from tests.support.packed import rows, separate
from tests.trainer.model.test_attention import small

LONG = ((30, (25, 7)), (6, (3,)))


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("qwen2", {}, LogitsTransform()),
        ("gemma2", {"final_logit_softcapping": 3.0}, LogitsTransform(cap=3.0)),
        ("granite", {"logits_scaling": 4.0}, LogitsTransform(factor=0.25)),
        ("granite", {"logits_scaling": 1.0}, LogitsTransform()),
        ("cohere", {"logit_scale": 0.125}, LogitsTransform(factor=0.125)),
        ("minicpm3", {"dim_model_base": 16, "num_key_value_heads": 4}, LogitsTransform(divisor=2.0)),
    ],
)
def test_logits_are_those_that_the_model_itself_computes(
    kind: str, fields: dict[str, Any], expected: LogitsTransform
) -> None:
    model = small(kind, num_hidden_layers=1, **fields)
    transform = logits_transform(model)
    assert transform == expected
    ids = torch.arange(2, 12)[None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    mine = transform.after(model.get_output_embeddings()(transform.before(hidden)))
    assert torch.allclose(mine, model(input_ids=ids).logits, atol=1e-5)


def test_a_capped_policy_has_the_logprobs_and_gradients_of_separate_sequences_chunk_by_chunk() -> None:
    model = small("gemma2", final_logit_softcapping=2.0, sliding_window=12, attn_implementation="eager")
    weights = list(model.parameters())
    plain = separate(model, rows(0, LONG))
    expected = torch.autograd.grad(plain.mean(), weights)
    packed = Policy(model, chunk_tokens=7)(micro_batch(rows(0, LONG))).policy_logprobs_N
    assert torch.allclose(plain, packed, atol=1e-5)
    for mine, its in zip(torch.autograd.grad(packed.mean(), weights), expected, strict=True):
        assert torch.allclose(mine, its, atol=1e-5)


def test_a_setting_about_logits_that_is_not_known_is_refused() -> None:
    model = tiny.model(0)
    model.config.logits_mup_scale = 8.0
    with pytest.raises(SettingsError, match=r"found logits_mup_scale = 8.0 in the config of Qwen2ForCausalLM"):
        Policy(model)
    model.config.logits_mup_scale = 1.0
    assert logits_transform(model) == LogitsTransform()


def test_a_model_with_more_than_an_output_layer_on_top_is_refused() -> None:
    model = tiny.model(0)
    model.head = torch.nn.Linear(32, 32)
    with pytest.raises(SettingsError, match="one output layer, found head besides"):
        logits_transform(model)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype: torch.dtype) -> None:
    model = tiny.model(0)
    check_numbers(model, "m")
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(64, 32, dtype=dtype), requires_grad=False)
    with pytest.raises(SettingsError, match=r"found model.layers.1.mlp.up_proj.weight in torch.*which is quantised"):
        check_numbers(model, "m")


def test_a_critic_needs_no_logits_and_is_not_refused_for_them(tmp_path: Path) -> None:
    model = tiny.model(0)
    model.config.logits_mup_scale = 8.0
    model.save_pretrained(tmp_path)
    trunk, width = load_trunk(PolicySettings(model=str(tmp_path)), "", torch.float32)
    assert width == 32
    assert Critic(trunk, width)(micro_batch(rows(0, LONG))).tolist() == [0.0] * 35


def phi3(original: int = 24) -> Any:
    """A Phi-3 trained for ``original`` tokens and stretched to 512, with differing factors."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 6.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original, **factors}
    return small("phi3", rope_parameters=rope, original_max_position_embeddings=original)


def logprobs(model: Any, shape: Any) -> Tensor:
    actual: Tensor = Policy(model)(micro_batch(rows(0, shape))).policy_logprobs_N.detach()
    return actual


def test_longrope_does_not_depend_on_what_else_is_in_the_row() -> None:
    model, short, long = phi3(), (6, (3,)), (30, (25,))
    settle_rope(model)
    alone = separate(model, rows(0, (short,))).detach()
    packed = logprobs(model, (short, long))
    assert torch.allclose(packed[:3], alone, atol=1e-5)
    by_batch = phi3()  # as transformers has it
    assert not torch.allclose(logprobs(by_batch, (short, long))[:3], logprobs(by_batch, (short,)), atol=1e-2)


@pytest.mark.parametrize(("context", "like_sequences_of"), [(0, 40), (512, 40), (25, 40), (24, 20)])
def test_longrope_takes_the_factors_of_the_runs_context(context: int, like_sequences_of: int) -> None:
    settled, plain = phi3(), phi3()
    settle_rope(settled, context)
    ids = torch.randint(2, tiny.VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    plain(input_ids=ids[:, :like_sequences_of])  # picks by this batch
    assert torch.equal(settled.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    settled(input_ids=ids[:, :5])
    settled(input_ids=ids)
    assert torch.equal(settled.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


def test_dynamic_rope_is_plain_within_its_context_and_refused_beyond_it_or_with_vllm() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model, plain = (small("llama", max_position_embeddings=40, **more) for more in ({"rope_parameters": rope}, {}))
    settle_rope(model)
    assert torch.equal(logprobs(model, LONG[1:]), logprobs(plain, LONG[1:]))
    with pytest.raises(SettingsError, match=r'at most 40 tokens with rope_type "dynamic".*found one of 54'):
        logprobs(model, LONG)
    with pytest.raises(SettingsError, match=r'"dynamic".*change rollout.engine to "transformers"'):
        check_rope_for_vllm(model.config)
    check_rope_for_vllm(plain.config)


def test_a_rope_type_that_is_not_known_is_refused() -> None:
    model = tiny.model(0)
    model.model.rotary_emb.rope_type = "spiral"
    with pytest.raises(SettingsError, match=r"found 'spiral' in Qwen2RotaryEmbedding: change policy.model"):
        settle_rope(model)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 2048}, "max_position_embeddings": 1}, 2048),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 4096),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "longrope", "factor": 32.0}}, 131072),
        ({}, 0),
    ],
)  # fmt: skip
def test_a_models_context_is_read_off_its_config(config: dict[str, Any], expected: int) -> None:
    assert own_context(config) == expected


@pytest.mark.parametrize(
    ("limit", "new", "said"),
    [
        (0, 512, "expected sampling.max_new_tokens below 512 tokens, the context of m, .* found 512: lower it, or change policy.model"),
        (100, 100, "below 100 tokens, rollout.vllm.max_model_len, .* or raise rollout.vllm.max_model_len"),
        (600, 10, "expected rollout.vllm.max_model_len within the 512 tokens that m reads, found 600"),
    ],
)  # fmt: skip
def test_lengths_that_cannot_be_had_are_refused_before_anything_starts(
    limit: int, new: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(limit: int, new: int, *flags: str) -> None:
        lengths = [f"--rollout.vllm.max_model_len={limit}", f"--sampling.max_new_tokens={new}"]
        check_context(load(None, [*lengths, *flags], {}))

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"max_position_embeddings": 512}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=said):
        check(limit, new, "--policy.model=m")
    check(512, 511, "--policy.model=m")
    check(0, 10_000, "--policy.model=other")
    check(0, 10_000, "--policy.model=m", "--algorithm.loss=cross_entropy")


def noisy(kind: str) -> Any:
    if kind == "opt":
        return small("opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, layerdrop=0.5)
    return small("phimoe", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.3, input_jitter_noise=0.3)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["opt", "phimoe"])
def test_a_model_trains_as_the_function_that_generates(kind: str, checkpointing: bool) -> None:
    model = noisy(kind)
    plain = separate(model, rows(0, LONG)).detach()
    policy = Policy(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    policy_logprobs_N = policy(micro_batch(rows(0, LONG))).policy_logprobs_N
    assert torch.allclose(policy_logprobs_N, plain, atol=1e-5)
    once = torch.autograd.grad(policy_logprobs_N.sum(), list(model.parameters()), allow_unused=True)
    again = torch.autograd.grad(
        policy(micro_batch(rows(0, LONG))).policy_logprobs_N.sum(), list(model.parameters()), allow_unused=True
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True) if a is not None and b is not None)


def test_checkpointed_layers_are_computed_twice_while_training_and_once_in_eval_mode() -> None:
    model, calls = tiny.model(0).requires_grad_(True), list[bool]()
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda module, _: calls.append(module.training))
    policy = Policy(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def gradient() -> None:
        policy(micro_batch(rows(0, LONG))).policy_logprobs_N.sum().backward()

    policy.train()
    gradient()
    assert calls == [False, False]
    policy.eval()
    gradient()
    assert calls == [False, False, False]
    policy.train()
    gradient()
    assert calls == [False] * 5


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's, about a model from no folder
def test_the_dropout_of_adapters_still_works_while_training() -> None:
    from penstock.services.trainer.model import adapter

    of = PolicySettings.model_validate(
        {"model": "tiny", "lora": {"rank": 2, "dropout": 0.5, "target_modules": ["q_proj"]}}
    )
    model = adapter.add(tiny.model(0), of)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    policy = Policy(model).train()
    drawn: Callable[[], Any] = lambda: policy(micro_batch(rows(0, LONG))).policy_logprobs_N.detach().numpy()  # noqa: E731
    assert not np.array_equal(drawn(), drawn())
    policy.eval()
    assert np.array_equal(drawn(), drawn())


def test_of_a_librarys_sentence_the_beginning_is_reported(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen2_vl"}))
    with pytest.raises(SettingsError, match=r"Unrecognized configuration class.* …: change policy.model") as refused:
        load_causal_model("policy.model", str(tmp_path), torch.float32)
    assert len(str(refused.value)) < 500
