"""Ranks that share experts and compute long rows together (``tests/support/expert_row_ranks.py``) compute what one does."""

from typing import Any

import pytest

from penstock.services.trainer.model import experts
from tests.support import expert_ranks, tiny
from tests.support.expert_ranks import RECURRENT
from tests.support.expert_row_ranks import ALGORITHM, FAMILIES, GROUPS, STAGES
from tests.support.launched_ranks import found_by
from tests.support.tolerance import FORWARD, GRADIENT, MOVEMENT, RESUMED, ULPS, moved_apart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2300)]
EXACT = 1e-5
"""Float32 sums in another order: nats, and shares of a norm; 2e-6 is the most observed."""
ATTENDING = [name for name in FAMILIES if name not in RECURRENT]
SHAPES = [(ranks, *groups) for ranks, every in GROUPS.items() for groups in every]
OF_ALGORITHM = [(ranks, stage) for ranks, stages in ALGORITHM.items() for stage in stages]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Of four ranks, and of two, which also resume what the four have written."""
    folder, scenes = tmp_path_factory.mktemp("expert rows"), {}
    for number, name in ((4, "four"), (2, "two")):
        (folder / name).mkdir()
        scenes[number] = found_by("expert_row_ranks", number, folder / name, 1100)
    return scenes


def assert_the_step_of_transformers(gaps: dict[str, float]) -> None:
    assert gaps["logprobs"] < EXACT
    assert gaps["norm"] < EXACT
    assert gaps["all weights"] < EXACT, "to their movement"
    assert gaps["weights"] < MOVEMENT, "of any weight, to its own movement"
    assert gaps["missing"] == 0


@pytest.mark.parametrize("family", sorted(experts.PROVEN - RECURRENT))
def test_a_step_is_that_of_transformers(ranks: dict[int, Any], family: str) -> None:
    """At ZeRO stage 3; at others of one family, by groups."""
    assert_the_step_of_transformers(ranks[2][family])


@pytest.mark.parametrize(
    ("number", "parallel", "together", "stage"), [(*of, stage) for of, stages in STAGES.items() for stage in stages]
)
def test_groups_of_experts_take_ranks_of_one_row_and_of_several(
    ranks: dict[int, Any], number: int, parallel: int, together: int, stage: int
) -> None:
    assert_the_step_of_transformers(ranks[number][f"{parallel} by {together} {stage}"])


@pytest.mark.parametrize("family", ATTENDING)
def test_logprobs_and_gradients_of_rows_in_parts_are_those_of_transformers(ranks: dict[int, Any], family: str) -> None:
    """With shared prompts and trees, as the self-test compares them."""
    assert max(ranks[2][f"started {family}"].values()) < EXACT


@pytest.mark.parametrize(("number", "parallel", "together"), SHAPES)
def test_the_self_test_adds_the_gradients_of_all_ranks_with_an_expert(
    ranks: dict[int, Any], number: int, parallel: int, together: int
) -> None:
    assert max(ranks[number][f"started {parallel} by {together}"].values()) < EXACT


@pytest.mark.parametrize(
    ("family", "layer"), [("qwen3_5_moe_text", "Qwen3_5MoeGatedDeltaNet"), ("qwen3_next", "Qwen3NextGatedDeltaNet")]
)
def test_a_mixture_with_a_state_is_refused_by_its_layer(ranks: dict[int, Any], family: str, layer: str) -> None:
    assert family in RECURRENT
    sentence = ranks[2][f"started {family}"]
    assert f"found {layer}, whose state passes along the whole row" in sentence
    assert sentence.endswith("set trainer.sequence_parallel to 1")


def test_a_rank_of_a_long_row_shares_experts_with_one_that_has_its_own_rows(ranks: dict[int, Any]) -> None:
    order = ranks[4]["order"]
    assert any(len(set(passes)) == 2 for passes in zip(*order, strict=True)), order


@pytest.mark.parametrize("number", GROUPS)
def test_the_imbalance_counts_each_token_of_a_row_once(ranks: dict[int, Any], number: int) -> None:
    figure, expected = ranks[number]["imbalance"]
    assert figure == pytest.approx(expected, rel=ULPS)
    assert figure > 1


@pytest.mark.parametrize(("number", "stage"), OF_ALGORITHM)
@pytest.mark.parametrize("kind", ["live", "critic"])
def test_steps_of_the_algorithm_are_those_of_whole_experts_and_rows(
    ranks: dict[int, Any], kind: str, number: int, stage: int
) -> None:
    """At stage 2 in the host's memory, at stage 3 with layers that are computed again."""
    whole, divided = ranks[number]["whole"][kind], ranks[number][f"divided {stage}"][kind]
    critic = ("value_loss", "critic_grad_norm") if kind == "critic" else ()
    for ours, theirs in zip(divided["measured"], whole["measured"], strict=True):
        for name in ("loss", "grad_norm", "kl_mean", *critic):
            assert ours[name] == pytest.approx(theirs[name], rel=GRADIENT, abs=FORWARD), name
        assert 1 <= ours["expert_imbalance"] <= 4
    assert moved_apart(divided["weights"], whole["weights"], dict(tiny.mixture(0).named_parameters())) < MOVEMENT
    if critic:
        start = dict(tiny.mixture(1).get_decoder().named_parameters())
        assert moved_apart(divided["values"], whole["values"], start) < MOVEMENT


@pytest.mark.parametrize(("number", "stage"), OF_ALGORITHM)
def test_routes_are_cut_as_the_tokens_of_a_row_are(ranks: dict[int, Any], number: int, stage: int) -> None:
    whole, divided = ranks[number]["whole"]["replayed"], ranks[number][f"divided {stage}"]["replayed"]
    assert divided["measured"]["routed_live"] == 0
    assert divided["measured"]["replayed_fraction"] > 0.9, "all but padding"
    for name in ("loss", "grad_norm", "kl_mean"):
        assert divided["measured"][name] == pytest.approx(whole["measured"][name], rel=GRADIENT, abs=FORWARD), name
    start = dict(tiny.mixture(0).named_parameters())
    assert moved_apart(divided["weights"], whole["weights"], start) < MOVEMENT
    live = ranks[number]["whole"]["live"]["measured"][0]
    assert abs(whole["measured"]["loss"] - live["loss"]) > 0.1, "the routes are others"


@pytest.mark.parametrize("number", GROUPS)
def test_a_step_with_adapters_is_that_of_whole_experts_and_rows(ranks: dict[int, Any], number: int) -> None:
    whole, *divided = ranks[number]["adapters"]
    start = {name: weight.detach() for name, weight in expert_ranks.family("qwen2_moe").named_parameters()}
    for each in divided:
        assert each["norm"] == pytest.approx(whole["norm"], rel=GRADIENT)
        assert moved_apart(each["weights"], whole["weights"], start) < MOVEMENT


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("number", GROUPS)
def test_what_is_published_and_saved_comes_back_to_the_bit(ranks: dict[int, Any], number: int, stage: int) -> None:
    assert ranks[number]["published"] == {"names": True, "shapes": True, "other": []}
    assert ranks[number][f"resumed {stage}"] == {"error": "", "norms": True, "other": [], "unsaved": []}


@pytest.mark.parametrize("scene", ["by whole rows 1", "by whole rows 3", "of four 1", "of four 3"])
def test_other_ranks_and_groups_continue_a_checkpoint(ranks: dict[int, Any], scene: str) -> None:
    assert ranks[2][scene]["unlike"] == [], "weights, to the bit"
    assert ranks[2][scene]["apart"] < RESUMED


@pytest.mark.parametrize("stage", [1, 3])
def test_the_self_test_goes_through_rows_in_parts_and_divided_experts(ranks: dict[int, Any], stage: int) -> None:
    passed, broken = ranks[2][f"self-test {stage}"]
    assert passed == ""
    assert "expected logprobs and gradients of the unmodified" in broken
