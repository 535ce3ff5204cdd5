"""Ranks that share a mixture's experts (``tests/support/expert_ranks.py``) compute what whole experts do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.trainer.model import experts
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from tests.support import expert_ranks, tiny
from tests.support.launched_ranks import found_by
from tests.support.tolerance import FORWARD, GRADIENT, MOVEMENT, RESUMED, ULPS, moved_apart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAME = {"names": True, "shapes": True, "other": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def two(folder: Path, four: dict[str, Any]) -> dict[str, Any]:
    """Of two ranks, which also resume what ``four`` have written."""
    (folder / "two").mkdir()
    return found_by("expert_ranks", 2, folder / "two", 800)


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, Any]:
    (folder / "four").mkdir()
    return found_by("expert_ranks", 4, folder / "four", 800)


def assert_a_step_of_whole_experts(gaps: dict[str, float]) -> None:
    assert gaps["logprobs"] < 1e-5
    assert gaps["norm"] < 1e-5
    assert gaps["weights"] < MOVEMENT, "of any weight, to its own movement"
    assert gaps["missing"] == 0


@pytest.mark.parametrize(("family", "stage"), expert_ranks.FAMILIES)
def test_a_step_with_divided_experts_is_that_of_transformers(two: dict[str, Any], family: str, stage: int) -> None:
    assert_a_step_of_whole_experts(two[f"{family}-{stage}"])


@pytest.mark.parametrize("offload", ["optimizer-1", "optimizer-2", "optimizer-3", "all-3"])
def test_a_step_with_divided_experts_in_the_hosts_memory_is_that_of_transformers(
    two: dict[str, Any], offload: str
) -> None:
    assert_a_step_of_whole_experts(two[offload])


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_the_same_experts_add_their_gradients(four: dict[str, Any], stage: int) -> None:
    assert_a_step_of_whole_experts(four[f"qwen3_moe-{stage}"])


def test_ranks_with_the_same_experts_divide_them_at_zero_stage_3(four: dict[str, Any]) -> None:
    assert set(four["held"]) == {1 / 4}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_with_adapters_beside_divided_experts_is_that_beside_whole_ones(two: dict[str, Any], stage: int) -> None:
    whole, divided = two[f"adapted-{stage}"]
    assert divided["norm"] == pytest.approx(whole["norm"], rel=GRADIENT)
    start = {name: weight.detach() for name, weight in expert_ranks.family("qwen2_moe").named_parameters()}
    moved = [name for name, tensor in start.items() if not torch.equal(tensor, whole["weights"][name])]
    assert len(moved) > 20
    assert (
        moved_apart(*[{name: of[name] for name in moved} for of in (divided["weights"], whole["weights"], start)])
        < MOVEMENT
    )
    assert all(torch.equal(divided["weights"][name], start[name]) for name in start.keys() - set(moved))


@pytest.mark.parametrize(
    ("ranks", "scene"),
    [("two", "published-1"), ("two", "published-2"), ("two", "published-3"), ("two", "published-bfloat16")]
    + [("four", "published-2"), ("four", "published-3")],
)
def test_published_tensors_are_the_models_to_the_byte(request: pytest.FixtureRequest, ranks: str, scene: str) -> None:
    assert request.getfixturevalue(ranks)[scene] == SAME


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("packing", ["rows", "sequences"])
def test_steps_of_the_algorithm_are_those_with_whole_experts(two: dict[str, Any], packing: str, place: int) -> None:
    whole, divided = two[packing][0], two[packing][place]
    for ours, theirs in zip(divided["measured"], whole["measured"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=FORWARD)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=GRADIENT)
        assert ours["micro_batches"] > 1
        assert 1 <= ours.pop("expert_imbalance") <= 4
        assert ours.keys() == theirs.keys()
    start = dict(tiny.mixture(0).named_parameters())
    assert moved_apart(divided["weights"], whole["weights"], start) < MOVEMENT


@pytest.mark.parametrize("stage", [1, 3])
def test_layers_that_are_computed_again_exchange_their_tokens_again(two: dict[str, Any], stage: int) -> None:
    whole = two["rows"][0]
    start = dict(tiny.mixture(0).named_parameters())
    assert moved_apart(two[f"again-{stage}"]["weights"], whole["weights"], start) < MOVEMENT


def assert_the_same_step(ours: dict[str, Any], theirs: dict[str, Any], *figures: str) -> None:
    for name in figures:
        assert ours["measured"][name] == pytest.approx(theirs["measured"][name], rel=GRADIENT, abs=FORWARD), name
    start = {name: tensor for name, tensor in tiny.mixture(0).named_parameters() if name in theirs["weights"]}
    assert moved_apart(ours["weights"], theirs["weights"], start) < MOVEMENT


def test_ranks_get_the_routes_of_what_they_pack(two: dict[str, Any]) -> None:
    part = two["replayed in part"]
    assert part["measured"]["routed_live"] == 2, "a sample's routes are lost, and another's are too few"
    assert 0.5 < part["measured"]["replayed_fraction"] < 1
    assert part["live"]["replayed_fraction"] == 0
    assert len(part["layout"]) > 64, "the plan has what was replayed"
    start = dict(tiny.mixture(0).named_parameters())
    assert moved_apart(two["rows"][0]["weights"], part["weights"], start) > 100 * MOVEMENT, "not the live step"


@pytest.mark.parametrize("name", expert_ranks.REPLAYED)
def test_a_step_with_routes_is_the_same_however_ranks_divide_it(two: dict[str, Any], name: str) -> None:
    whole, divided = two["replayed"], two[f"replayed {name}"]
    assert (divided["measured"]["routed_live"], whole["measured"]["routed_live"]) == (0, 0)
    assert divided["measured"]["replayed_fraction"] > 0.9, "all but padding"
    assert whole["measured"]["replayed_fraction"] == 1
    assert_the_same_step(divided, whole, "loss", "grad_norm", "kl_mean")


@pytest.mark.parametrize("name", expert_ranks.REPLAYED)
def test_a_step_with_routes_of_turns_is_the_same_however_ranks_divide_it(two: dict[str, Any], name: str) -> None:
    whole, divided = two["replayed episodes"], two[f"replayed episodes {name}"]
    assert (divided["measured"]["routed_live"], whole["measured"]["routed_live"]) == (0, 0)
    assert 0.5 < whole["measured"]["replayed_fraction"] < two["replayed"]["measured"]["replayed_fraction"]
    assert_the_same_step(divided, whole, "loss", "grad_norm", "kl_mean")


def test_adapters_are_trained_with_routes_at_zero_stage_3_as_at_1(two: dict[str, Any]) -> None:
    first, third = two["replayed with adapters"]
    assert first["measured"]["replayed_fraction"] == 1
    assert_the_same_step(third, first, "loss", "grad_norm", "kl_mean")


@pytest.mark.parametrize("stage", [1, 3])
def test_steps_with_a_critic_of_divided_experts_are_those_with_whole_experts(two: dict[str, Any], stage: int) -> None:
    whole, divided = two["critic-0"], two[f"critic-{stage}"]
    for ours, theirs in zip(divided["measured"], whole["measured"], strict=True):
        for name in ("loss", "grad_norm", "value_loss", "critic_grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=GRADIENT, abs=FORWARD), name
    policy, values = tiny.mixture(0), tiny.mixture(1).get_decoder()
    assert moved_apart(divided["weights"], whole["weights"], dict(policy.named_parameters())) < MOVEMENT
    assert moved_apart(divided["values"], whole["values"], dict(values.named_parameters())) < MOVEMENT


def test_a_critic_of_divided_experts_is_continued_by_its_ranks_and_by_others(two: dict[str, Any]) -> None:
    assert two["continued-critic"] == [True, True]


def test_a_critic_routes_live_beside_a_policy_with_routes(two: dict[str, Any]) -> None:
    whole, divided = two["replayed with a critic"]
    assert_the_same_step(divided, whole, "loss", "grad_norm", "value_loss", "critic_grad_norm")
    live = two["critic-0"]["measured"][0]
    assert whole["measured"]["value_loss"] == pytest.approx(live["value_loss"], abs=FORWARD)
    assert abs(whole["measured"]["loss"] - live["loss"]) > 0.1, "the policy's routes are others"


@pytest.mark.parametrize("stage", [1, 3])
def test_moments_of_eight_bits_of_divided_experts_make_almost_the_same_steps_and_are_saved(
    two: dict[str, Any], stage: int
) -> None:
    steps = two[f"adamw_8bit-{stage}"]
    # an 8-bit moment is off by up to 1/128
    assert 1e-4 < steps["apart"] < 0.05
    assert steps["resumed"]
    assert steps["saved"]


@pytest.mark.parametrize(
    ("ranks", "scene"),
    [("two", scene) for scene in ("1", "2", "3", "offload", "adapters-1", "adapters-3")]
    + [("four", "1"), ("four", "3")],
)
def test_a_checkpoint_brings_back_what_was_saved_to_the_bit(
    request: pytest.FixtureRequest, ranks: str, scene: str
) -> None:
    resumed = request.getfixturevalue(ranks)[f"resumed-{scene}"]
    assert resumed == {"error": "", "norms": True, "other": [], "unsaved": []}


@pytest.mark.parametrize(
    "scene",
    ["1 by 3 with 2", "3 by 1 with 2", "2 by 2 with 1", "3 by 3 with 1", "whole 1", "whole 3", "four 1", "four 3"]
    + ["offload by 2 with 2", "adapters-1 by 2 with 1", "adapters-3 by 2 with 1"],
)
def test_other_ranks_stages_and_divisions_of_experts_continue_a_checkpoint(two: dict[str, Any], scene: str) -> None:
    assert two[scene]["unlike"] == [], "weights, to the bit"
    assert two[scene]["apart"] < RESUMED


@pytest.mark.parametrize("stage", [1, 3])
def test_the_self_test_goes_through_divided_experts(two: dict[str, Any], stage: int) -> None:
    passed, broken = two[f"self-test-{stage}"]
    assert passed == ""
    assert "expected logprobs and gradients of the unmodified" in broken


def test_a_token_travels_once_to_a_rank_with_several_of_its_experts(two: dict[str, Any]) -> None:
    travels = two["travels"]
    assert travels["sent"] == travels["choices"] == travels["ranks"] < travels["experts"]


def test_the_imbalance_is_that_of_the_routers(two: dict[str, Any]) -> None:
    figure, expected = two["imbalance"]
    assert figure == pytest.approx(expected, rel=ULPS)
    assert figure > 1


def test_a_deepspeed_that_divides_experts_among_all_ranks_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    weight: Any = layer.weight
    weight.ds_zero_partition_process_group = weight.ds_process_group = object()
    experts.check_division(layer)
    weight.ds_process_group = object()  # as older releases, which do not know the mark
    with pytest.raises(SettingsError, match="expected a DeepSpeed that divides a weight among ranks of its own"):
        experts.check_division(layer)


def test_models_that_cannot_be_divided_are_refused(two: dict[str, Any]) -> None:
    dense, uneven, unknown, wrapped = two["refusals"]
    assert dense == (
        "expected a mixture of experts with trainer.expert_parallel = 2, found 'qwen2': set trainer.expert_parallel to 1"
    )
    assert uneven.startswith("expected experts that trainer.expert_parallel = 2 divides, found 3: set")
    assert unknown.startswith("trainer.expert_parallel = 2 is not tested with 'granitemoeshared', but with deepseek_v2")
    assert wrapped.startswith(
        "expected no adapters of experts with trainer.expert_parallel = 2, found some: set it to 1"
    )


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"ranks": 3}, "expected trainer.expert_parallel to divide the 3 ranks of trainer.ranks × trainer.nodes"),
        ({"zero_stage": 0}, "expected 1, 2 or 3 in trainer.zero_stage with trainer.expert_parallel = 2, found 0"),
        (
            {"ranks": 6, "sequence_parallel": 3},
            "expected a divisor or a multiple in trainer.sequence_parallel with trainer.expert_parallel = 2, found 3",
        ),
        ({"deepspeed": {"zero_optimization": {"reduce_scatter": False}}}, "found \\['reduce_scatter'\\]"),
        (
            {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}},
            "expected nothing at zero_stage 1 in trainer",
        ),
        ({"deepspeed": {"expert_parallel": {"enabled": True}}}, "what decides it is trainer.expert_parallel"),
    ],
)
def test_what_was_not_tested_with_divided_experts_is_refused(trainer: dict[str, Any], sentence: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=sentence):
        Settings.model_validate({"trainer": {"ranks": 2, "expert_parallel": 2, **trainer}})
