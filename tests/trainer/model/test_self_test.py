"""The self-test at a trainer's start names what is wrong and changes nothing."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.services.trainer.batch.packing import PackedRow
from penstock.services.trainer.batch.segments import Segments
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.layers import mixers
from penstock.services.trainer.model.policy import Policy, load_model, load_trunk
from penstock.services.trainer.self_test import random_rows, reached_weights, self_test, unmodified_model
from penstock.shared.errors import SettingsError
from penstock.shared.model.causal_model import ordinary_ids
from penstock.shared.settings import PolicySettings
from tests.support import model_zoo


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "_ROOM_BYTES", 0)  # other tests may leave less
        yield


@pytest.fixture(scope="module")
def folders() -> Iterator[dict[str, Path]]:
    names = ("qwen3", "lfm2")
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            model_zoo.save(name, Path(root) / name)
        yield {name: Path(root) / name for name in names}


def opened(folder: Path, packing: Any = "auto", dtype: torch.dtype = torch.float32) -> Policy:
    return Policy(load_model(PolicySettings(model=str(folder)), dtype), packing=packing).train()


def test_a_policy_that_computes_what_the_model_does_passes_and_is_left_as_it_was(folders: dict[str, Path]) -> None:
    policy = opened(folders["qwen3"])
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    modes = [module.training for module in policy.modules()]
    implementation, random_state = policy.model.config._attn_implementation, torch.get_rng_state()

    result = self_test.run(policy, "auto", is_sharded=True)

    assert (result.packing, result.reason) == ("rows", "")
    assert result.gap.max_nats < 1e-5
    assert result.gap.gradient < 1e-5
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in policy.parameters())
    assert [module.training for module in policy.modules()] == modes
    assert policy.model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), random_state)


def test_layers_computed_again_and_adapters_with_dropout_pass(folders: dict[str, Path]) -> None:
    settings = PolicySettings.model_validate({"model": str(folders["qwen3"]), "lora": {"rank": 2, "dropout": 0.5}})
    policy = Policy(adapter.add(load_model(settings, torch.float32), settings))
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    dropping = [module for module in policy.modules() if isinstance(module, nn.Dropout) and module.training]

    assert self_test.run(policy, "rows").gap.gradient < 1e-5
    assert dropping
    assert all(module.training for module in dropping)


def test_half_precision_passes_within_the_spread_of_its_roundings(folders: dict[str, Path]) -> None:
    policy = opened(folders["qwen3"], dtype=torch.bfloat16)
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    result = self_test.run(policy, "rows")
    assert result.widened is not None
    assert result.widened.mean_nats < 1e-5  # the mathematics are the same
    assert result.widened.gradient < 1e-5
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.state_dict().items())
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    assert 0 < result.gap.mean_nats < result.limit.mean_nats == 0.05
    assert 0 < result.gap.gradient < result.limit.gradient == 0.1


def blind_to_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "install", lambda module: None)
    monkeypatch.setattr(mixers, "unpackable", lambda module: "")


def test_packed_rows_that_differ_give_way_to_sequences_and_the_layer_is_named(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    blind_to_boundaries(monkeypatch)
    result = self_test.run(opened(folders["lfm2"]), "auto")
    assert result.packing == "sequences"
    assert "the first module whose output differs is model.layers.0.conv" in result.reason
    assert result.gap.max_nats < 1e-5


def test_branches_that_see_one_another_give_way_to_sequences(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def until(of: Segments) -> Any:
        """Until the end of the sample, of a tree's segments too."""
        return np.repeat([of.ends[of.path(k)[:2][-1]] for k in range(len(of.ends))], of.lengths_K)

    monkeypatch.setattr(Segments, "until", property(until))
    result = self_test.run(opened(folders["qwen3"]), "auto")
    assert result.packing == "sequences"
    assert "the first module whose output differs is model.layers.0.self_attn" in result.reason


def test_packed_rows_that_differ_are_refused_where_they_are_asked_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    blind_to_boundaries(monkeypatch)
    refusal = 'model.layers.0.conv.* by .* of its norm: change policy.model or trainer.packing to "sequences"'
    with pytest.raises(SettingsError, match=refusal):
        self_test.run(opened(folders["lfm2"], "rows"), "rows")


def test_a_wrong_scale_of_logits_is_refused_and_named(folders: dict[str, Path]) -> None:
    policy = opened(folders["qwen3"], "rows")
    output = policy.model.get_output_embeddings()
    output.register_forward_pre_hook(lambda module, args: (args[0] * 1.1, *args[1:]) if len(args) > 1 else None)
    with pytest.raises(
        SettingsError, match="all hidden states agree, so the output layer or the scale of logits differs"
    ):
        self_test.run(policy, "rows")


def test_half_precision_hides_no_small_mistake(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = opened(folders["qwen3"], "rows", torch.bfloat16)
    scale, plain = [1.0], unmodified_model.unmodified
    attention = policy.model.model.layers[1].self_attn
    attention.register_forward_hook(lambda module, args, output: (output[0] * scale[0], *output[1:]))

    @contextlib.contextmanager
    def without(model: Any) -> Iterator[None]:
        scale[0] = 1.0
        with plain(model):
            yield
        scale[0] = 1.4

    monkeypatch.setattr(self_test, "unmodified", without)
    monkeypatch.setattr(self_test, "_has_room", lambda narrow: False)
    result = self_test.run(policy, "rows")  # within bfloat16's roundings
    assert result.widened is None
    monkeypatch.undo()
    scale[0] = 1.0
    monkeypatch.setattr(self_test, "unmodified", without)
    with pytest.raises(SettingsError, match=r"of the unmodified Qwen3ForCausalLM, within 0.02"):
        self_test.run(policy, "rows")


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / 2


def test_a_kernel_that_is_right_forward_and_wrong_backward_is_refused(folders: dict[str, Path]) -> None:
    policy = opened(folders["qwen3"], "rows")
    norm = policy.model.model.layers[1].input_layernorm

    def fused(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Halved.apply(type(norm).forward(norm, hidden))
        return out

    fused.__module__ = "liger_kernel.ops"
    norm.__dict__["forward"] = fused
    with pytest.raises(SettingsError, match=r"logprobs differ by .*e-0[67] nats at most and .* the gradient by 0"):
        self_test.run(policy, "rows")
    assert norm.__dict__["forward"] is fused


def test_a_model_that_sees_ahead_is_refused(folders: dict[str, Path]) -> None:
    policy = opened(folders["qwen3"], "sequences")
    policy.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: out + 0.1 * out.mean(1, keepdim=True)
    )
    with pytest.raises(SettingsError, match="lets what a token predicts depend on the tokens after it"):
        self_test.run(policy, "sequences")


def test_what_transformers_cannot_run_is_refused_in_a_sentence(folders: dict[str, Path]) -> None:
    policy = opened(folders["qwen3"], "sequences")
    policy.model.model.norm.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(SettingsError, match="that transformers can run, but Qwen3ForCausalLM raises RuntimeError"):
        self_test.run(policy, "sequences")


class _ExpertModules(nn.Module):
    """Two experts, each of which sees only the tokens that are routed to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        output_BTD = torch.zeros_like(hidden_BTD)
        for number, expert in enumerate(self.experts):
            routed_BT = (hidden_BTD[..., 0] > 0) == bool(number)
            if routed_BT.any():
                output_BTD[routed_BT] = expert(hidden_BTD[routed_BT])
        return output_BTD


@pytest.mark.parametrize("checkpointing", [False, True])
def test_passes_that_reach_different_weights_are_refused_with_several_ranks(
    folders: dict[str, Path], checkpointing: bool
) -> None:
    policy = opened(folders["qwen3"])
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    self_test.run(policy, "auto", is_sharded=True)
    layer = policy.model.model.layers[1]
    layer.mlp = _ExpertModules(policy.model.config.hidden_size)
    self_test.run(policy, "auto")
    with pytest.raises(
        SettingsError, match=r"does not reach 1 of \d+, the first .*mlp\.experts\.[01]\.weight.*ranks to 1"
    ):
        self_test.run(policy, "auto", is_sharded=True)


def test_weights_are_looked_for_in_two_passes_however_many_there_are(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = opened(folders["qwen3"])
    rows, passes, reached = (
        random_rows.draw(policy.model, torch.device("cpu"), 0),
        list[int](),
        reached_weights._reached,
    )

    def counted(policy: Policy | Critic, rows: Sequence[PackedRow]) -> set[int]:
        passes.append(len(rows))
        return reached(policy, rows)

    monkeypatch.setattr(reached_weights, "_reached", counted)
    reached_weights.check(policy, rows, "policy.model")
    assert passes == [len(rows), 0]


def critic(folder: Path, packing: Any = "auto", dtype: torch.dtype = torch.float32) -> Critic:
    trunk, width = load_trunk(PolicySettings(model="unused"), str(folder), dtype)
    return Critic(trunk, width, packing=packing).train()


def test_a_critic_that_computes_what_its_model_does_passes_and_is_left_as_it_was(folders: dict[str, Path]) -> None:
    tested = critic(folders["qwen3"])
    weights = {name: tensor.clone() for name, tensor in tested.state_dict().items()}
    modes, random_state = [module.training for module in tested.modules()], torch.get_rng_state()

    result = self_test.run(tested, "auto")

    assert (result.of, result.packing, result.reason) == ("hidden states", "rows", "")
    assert result.gap.max_nats < 1e-4  # unit vectors times √32, by 2 float32 layers
    assert result.gap.gradient < 1e-4
    assert str(result).startswith("hidden states differ by ")
    assert all(torch.equal(weights[name], tensor) for name, tensor in tested.state_dict().items())
    assert [module.training for module in tested.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_critic_in_half_precision_passes_within_the_spread_of_its_roundings(folders: dict[str, Path]) -> None:
    result = self_test.run(critic(folders["qwen3"], dtype=torch.bfloat16), "rows")
    assert result.widened is not None
    assert result.widened.mean_nats < 1e-4
    assert 0 < result.gap.mean_nats < result.limit.mean_nats


def test_a_critic_whose_packed_rows_differ_goes_sequence_by_sequence_or_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    blind_to_boundaries(monkeypatch)
    tested = critic(folders["lfm2"])
    result = self_test.run(tested, "auto")
    assert (result.packing, tested.trunk.packing) == ("sequences", "sequences")
    assert "the first module whose output differs is layers.0.conv" in result.reason
    assert result.gap.max_nats < 1e-4
    with pytest.raises(SettingsError, match=r"hidden states and .* change algorithm.critic.model or trainer.packing"):
        self_test.run(critic(folders["lfm2"], "rows"), "rows")


def test_a_critic_with_a_gradient_of_its_own_is_refused(folders: dict[str, Path]) -> None:
    tested = critic(folders["qwen3"], "rows")
    norm = tested.model.layers[1].input_layernorm

    def fused(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Halved.apply(type(norm).forward(norm, hidden))
        return out

    fused.__module__ = "liger_kernel.ops"
    norm.__dict__["forward"] = fused
    with pytest.raises(SettingsError, match=r"hidden states differ by .*, the gradient by 0"):
        self_test.run(tested, "rows")


def test_a_critic_that_sees_ahead_is_refused(folders: dict[str, Path]) -> None:
    tested = critic(folders["qwen3"], "sequences")
    tested.model.embed_tokens.register_forward_hook(lambda module, args, out: out + 0.1 * out.mean(1, keepdim=True))
    with pytest.raises(SettingsError, match=r"depend on the tokens after it .*: change algorithm.critic.model"):
        self_test.run(tested, "sequences")


def test_tokens_are_ordinary_and_cross_short_windows() -> None:
    from transformers import Gemma3Config

    model = Policy.__new__(Policy)
    nn.Module.__init__(model)
    config: Any = Gemma3Config(
        text_config={"vocab_size": 300, "sliding_window": 64, "pad_token_id": 7, "eos_token_id": [8, 9]},
        image_token_index=262,
    )
    model.config = config
    ids = ordinary_ids(config)
    assert not {7, 8, 9, 262} & set(ids.tolist())
    rows = random_rows.draw(model, torch.device("cpu"), 0)
    assert len(rows[0].prompt_token_ids) == 140
    config.text_config.sliding_window = 150
    assert len(random_rows.draw(model, torch.device("cpu"), 0)[0].prompt_token_ids) == 158
    config.text_config.sliding_window = 4096
    assert len(random_rows.draw(model, torch.device("cpu"), 0)[0].prompt_token_ids) == 140
    config.text_config.max_position_embeddings = 32
    short = random_rows.draw(model, torch.device("cpu"), 0)
    assert max(len(row.prompt_token_ids) + len(sample.token_ids) for row in short for sample in row.samples) == 32
