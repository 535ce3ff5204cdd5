"""Ranks that share a mixture's experts (``tests/support/expert_ranks.py``) compute what whole experts do."""

from typing import Any

import pytest

from penstock.services.trainer.model import experts
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from tests.support import tiny
from tests.support.launched_ranks import found_by
from tests.support.tolerance import FORWARD, GRADIENT, MOVEMENT, ULPS, moved_apart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAME = {"names": True, "shapes": True, "other": []}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("expert_ranks", 2, tmp_path_factory.mktemp("two"), 800)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("expert_ranks", 4, tmp_path_factory.mktemp("four"), 800)


def assert_a_step_of_whole_experts(gaps: dict[str, float]) -> None:
    assert gaps["logprobs"] < 1e-5
    assert gaps["norm"] < 1e-5
    assert gaps["weights"] < MOVEMENT, "of any weight, to its own movement"
    assert gaps["missing"] == 0


@pytest.mark.parametrize("family", sorted(experts.PROVEN))
def test_a_step_with_divided_experts_is_that_of_transformers(two: dict[str, Any], family: str) -> None:
    assert_a_step_of_whole_experts(two[family])


def test_ranks_with_the_same_experts_add_their_gradients(four: dict[str, Any]) -> None:
    assert_a_step_of_whole_experts(four["qwen3_moe"])
    assert four["published"] == SAME


@pytest.mark.parametrize("scene", ["published-1", "published-2", "published-bfloat16"])
def test_published_tensors_are_the_models_to_the_byte(two: dict[str, Any], scene: str) -> None:
    assert two[scene] == SAME


@pytest.mark.parametrize("packing", ["rows", "sequences"])
def test_steps_of_the_algorithm_are_those_with_whole_experts(two: dict[str, Any], packing: str) -> None:
    whole, divided = two[packing]
    for ours, theirs in zip(divided["measured"], whole["measured"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=FORWARD)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=GRADIENT)
        assert ours["micro_batches"] > 1
        assert 1 <= ours.pop("expert_imbalance") <= 4
        assert ours.keys() == theirs.keys()
    start = dict(tiny.mixture(0).named_parameters())
    assert moved_apart(divided["weights"], whole["weights"], start) < MOVEMENT


def test_layers_that_are_computed_again_exchange_their_tokens_again(two: dict[str, Any]) -> None:
    whole, _ = two["rows"]
    start = dict(tiny.mixture(0).named_parameters())
    assert moved_apart(two["again"]["weights"], whole["weights"], start) < MOVEMENT


def test_ranks_get_the_routes_of_what_they_pack_and_divided_experts_follow_them(two: dict[str, Any]) -> None:
    whole, divided = two["replayed"]
    for each in (whole, divided):
        assert each["measured"]["routed_live"] == 2, "a sample's routes are lost, and another's are too few"
        assert 0.5 < each["measured"]["replayed_fraction"] < 1
        assert each["live"]["replayed_fraction"] == 0
        assert len(each["layout"]) > 64, "the plan has what was replayed"
    assert divided["measured"]["loss"] == pytest.approx(whole["measured"]["loss"], abs=FORWARD)
    assert divided["measured"]["grad_norm"] == pytest.approx(whole["measured"]["grad_norm"], rel=GRADIENT)
    assert divided["measured"]["kl_mean"] == pytest.approx(whole["measured"]["kl_mean"], abs=FORWARD)
    start = dict(tiny.mixture(0).named_parameters())
    assert moved_apart(divided["weights"], whole["weights"], start) < MOVEMENT
    assert moved_apart(two["rows"][0]["weights"], whole["weights"], start) > 100 * MOVEMENT, "not the live step"


@pytest.mark.parametrize(("ranks", "scene"), [("two", "resumed-1"), ("two", "resumed-2"), ("four", "resumed")])
def test_a_checkpoint_brings_back_experts_to_the_bit_and_no_other_division(
    request: pytest.FixtureRequest, ranks: str, scene: str
) -> None:
    resumed = request.getfixturevalue(ranks)[scene]
    of_two, of_one, of_others = resumed.pop("refused")
    assert resumed == {"error": "", "norms": True, "other": [], "unsaved": []}
    assert "with trainer.expert_parallel = 2, which wrote it, found 1: change it back" in of_two
    assert "with trainer.expert_parallel = 1, which wrote it, found 2: change it back" in of_one
    assert "with the trainer.ranks, trainer.nodes and trainer.zero_stage that wrote it" in of_others


def test_the_self_test_goes_through_divided_experts(two: dict[str, Any]) -> None:
    passed, broken = two["self-test"]
    assert passed == ""
    assert "expected logprobs and gradients of the unmodified" in broken


def test_the_imbalance_is_that_of_the_routers(two: dict[str, Any]) -> None:
    figure, expected = two["imbalance"]
    assert figure == pytest.approx(expected, rel=ULPS)
    assert figure > 1


def test_models_that_cannot_be_divided_are_refused(two: dict[str, Any]) -> None:
    dense, uneven, unknown = two["refusals"]
    assert dense == (
        "expected a mixture of experts with trainer.expert_parallel = 2, found 'qwen2': set trainer.expert_parallel to 1"
    )
    assert uneven.startswith("expected experts that trainer.expert_parallel = 2 divides, found 3: set")
    assert unknown.startswith("trainer.expert_parallel = 2 is not tested with 'granitemoeshared', but with deepseek_v2")


@pytest.mark.parametrize(
    ("trainer", "others", "sentence"),
    [
        ({"ranks": 3}, {}, "expected trainer.expert_parallel to divide the 3 ranks of trainer.ranks × trainer.nodes"),
        ({"zero_stage": 3}, {}, "expected 1 or 2 in trainer.zero_stage with trainer.expert_parallel = 2, found 3"),
        ({"zero_stage": 0}, {}, "expected 1 or 2 in trainer.zero_stage with trainer.expert_parallel = 2, found 0"),
        ({"sequence_parallel": 2}, {}, "expected 1 in trainer.sequence_parallel with trainer.expert_parallel = 2"),
        ({"offload": "optimizer"}, {}, 'expected "none" in trainer.offload with trainer.expert_parallel = 2'),
        ({"optimizer": "adamw_8bit"}, {}, 'expected "adamw" in trainer.optimizer with trainer.expert_parallel = 2'),
        ({"deepspeed": {"zero_optimization": {"reduce_scatter": False}}}, {}, "found \\['reduce_scatter'\\]"),
        (
            {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}},
            {},
            "expected nothing at zero_stage 1 in trainer",
        ),
        ({}, {"policy": {"lora": {"rank": 4}}}, "expected trainer.expert_parallel = 1 with policy.lora, found 2"),
        ({}, {"algorithm": {"preset": "ppo"}}, "expected trainer.expert_parallel = 1 with a critic, found 2"),
        ({"deepspeed": {"expert_parallel": {"enabled": True}}}, {}, "what decides it is trainer.expert_parallel"),
    ],
)
def test_what_was_not_tested_with_divided_experts_is_refused(
    trainer: dict[str, Any], others: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((SettingsError, ValueError), match=sentence):
        Settings.model_validate({"trainer": {"ranks": 2, "expert_parallel": 2, **trainer}, **others})
