"""Two ranks (``tests/support/trainer_ranks.py``) learn what one learns, agree on failures, and resume."""

import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import tiny, tiny_hybrids, trainer_ranks
from tests.support.launched_ranks import found_by
from tests.support.tolerance import FORWARD, GRADIENT, MOVEMENT, RESUMED, moved_apart, smooth_adam
from tests.trainer.algorithm import test_tree_steps, test_update

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    for name in trainer_ranks.RELAID:
        uninterrupted(name).engine.save(folder / name / "one")()
    return {**found_by("trainer_ranks", 2, folder, 1100), "folder": folder}


def uninterrupted(name: str) -> trainer_ranks.Rank:
    """Return the one rank of a scene of ``RELAID`` after its first step."""
    stage, _, tables = trainer_ranks.RELAID[name]
    with warnings.catch_warnings(), smooth_adam():
        warnings.simplefilter("ignore")
        rank = trainer_ranks.Rank(trainer_ranks.settings(stage, 1, **tables))
        rank.learn(1)
    return rank


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", trainer_ranks.RELAID)
def test_a_checkpoint_is_continued_by_other_ranks_and_other_zero_stages_and_back(
    two: dict[str, Any], name: str
) -> None:
    rank, again, theirs = uninterrupted(name), uninterrupted(name), two[f"relaid {name}"]
    start = rank.weights()
    assert all(torch.equal(tensor, theirs["loaded"][key]) for key, tensor in start.items())
    rank.learn(2)
    assert moved_apart(theirs["weights"], rank.weights(), start) < RESUMED
    with smooth_adam():
        again.engine.load(two["folder"] / name / "two", of_others=trainer_ranks.RELAID[name][1] > 0)
    assert all(torch.equal(tensor, theirs["weights"][key]) for key, tensor in again.weights().items())
    for each in (rank, again):
        each.learn(3)
    assert moved_apart(again.weights(), rank.weights(), start) < RESUMED


def on_one_rank(longer: int = 0, batch: trainer_ranks.Batch = test_update.batch, **tables: Any) -> dict[str, Any]:
    return _on_one_rank(longer, batch, json.dumps(tables, sort_keys=True))


@functools.cache
def _on_one_rank(longer: int, batch: trainer_ranks.Batch, tables: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with smooth_adam():
            return trainer_ranks.two_steps(trainer_ranks.settings(0, 1, **json.loads(tables)), longer, batch)


def assert_same(actual: dict[str, Any], expected: dict[str, Any], make: Callable[[], Any] = tiny.model) -> None:
    for ours, theirs in zip(actual["measured"], expected["measured"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=FORWARD)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=GRADIENT)
        assert ours["kl_mean"] == pytest.approx(theirs["kl_mean"], abs=FORWARD)
    torch.manual_seed(0)
    start = {name: weight.detach() for name, weight in make().named_parameters()}
    assert moved_apart(actual["weights"], expected["weights"], start) < MOVEMENT


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_two_ranks_make_the_steps_of_one(two: dict[str, Any], zero_stage: int) -> None:
    assert_same(two[f"zero-{zero_stage}"], on_one_rank())


@pytest.mark.parametrize(
    ("name", "tables", "make"),
    [
        ("episodes-1", {}, tiny.model),
        ("episodes-3", {}, tiny.model),
        ("hybrid episodes", trainer_ranks.HYBRID, tiny_hybrids.HYBRIDS[trainer_ranks.HYBRID["model"]]),
    ],
)
def test_two_ranks_make_the_steps_of_one_on_trees(
    two: dict[str, Any], name: str, tables: dict[str, Any], make: Callable[[], Any]
) -> None:
    expected = on_one_rank(trainer_ranks.LONGER, test_tree_steps.episodes, **trainer_ranks.episodes(tables))
    assert_same(two[name], expected, make)


def test_trials_between_two_steps_of_two_ranks_change_nothing(two: dict[str, Any]) -> None:
    tried, untried = two["tried"], two["zero-3"]
    assert [step["grad_norm"] for step in tried["measured"]] == [step["grad_norm"] for step in untried["measured"]]
    assert all(torch.equal(tried["weights"][name], tensor) for name, tensor in untried["weights"].items())


def test_ranks_with_parts_of_the_weights_may_need_different_numbers_of_chunks_of_logits(two: dict[str, Any]) -> None:
    assert_same(two["chunks"], on_one_rank(trainer_ranks.LONGER))
    top_k = trainer_ranks.ALGORITHMS["top-k"]
    assert_same(two["top-k chunks"], on_one_rank(trainer_ranks.LONGER, algorithm=top_k))


def test_a_forward_pass_alone_changes_neither_published_weights_nor_the_next_step(two: dict[str, Any]) -> None:
    plain, actual = two["evaluated False"], two["evaluated True"]
    for name in ("weights", "after"):
        assert all(torch.equal(actual[name][key], tensor) for key, tensor in plain[name].items())
    assert actual["measured"][0]["grad_norm"] == plain["measured"][0]["grad_norm"]


@pytest.mark.parametrize("algorithm", list(trainer_ranks.ALGORITHMS))
def test_two_ranks_learn_what_one_rank_learns(two: dict[str, Any], algorithm: str) -> None:
    assert_same(two[algorithm], on_one_rank(algorithm=trainer_ranks.ALGORITHMS[algorithm]))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_ranks_make_the_steps_of_one_with_adapters_and_a_kl_to_the_policy_without_them(
    two: dict[str, Any], zero_stage: int
) -> None:
    actual = two[f"lora-{zero_stage}"]
    assert_same(actual, on_one_rank(lora=trainer_ranks.LORA, algorithm={"kl": trainer_ranks.KL}))
    first, second = actual["measured"]
    assert first["reference_kl"] == 0.0, "an adapter starts as nothing"
    assert second["reference_kl"] > 0.0


def test_ranks_that_call_recurrent_layers_unequally_often_make_the_steps_of_one(two: dict[str, Any]) -> None:
    expected = on_one_rank(trainer_ranks.LONGER, **trainer_ranks.HYBRID)
    assert_same(two["hybrid"], expected, tiny_hybrids.HYBRIDS[trainer_ranks.HYBRID["model"]])


@pytest.mark.parametrize(("name", "algorithm"), [("sequences", {}), ("sequences-dpo", trainer_ranks.ALGORITHMS["dpo"])])
def test_ranks_that_run_sequences_one_by_one_make_the_packed_steps_of_one(
    two: dict[str, Any], name: str, algorithm: dict[str, Any]
) -> None:
    assert_same(two[name], on_one_rank(trainer_ranks.LONGER, algorithm=algorithm))


def test_a_checkpoint_for_which_a_disk_has_room_for_one_rank_alone_is_not_begun(two: dict[str, Any]) -> None:
    refusal, written, none, whole = two["crowded"]["errors"]
    assert re.search(r"/second needs [\d,]+ bytes of all ranks, and [\d,]+ are free for them$", refusal)
    assert (written, none, whole) == ("0", "", str(two["crowded"]["files"]))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_no_rank_waits_in_a_collective_of_the_device_for_one_that_writes(two: dict[str, Any], zero_stage: int) -> None:
    """NCCL would end it after 10 minutes."""
    assert two[f"slow disk-{zero_stage}"] == {"error": "", "there": [True] * (zero_stage - 1)}


def test_no_rank_gathers_weights_while_the_first_waits_for_room_on_its_disk(two: dict[str, Any]) -> None:
    assert two["full disk"] == [True]


def test_ranks_with_adapters_come_back_from_their_checkpoint_to_the_bit(two: dict[str, Any]) -> None:
    (measured, weights), (again, others) = two["lora-resumed"].values()
    timeless = [name for name in measured if name not in ("model_tflops_per_s", "mfu")]
    assert {name: measured[name] for name in timeless} == {name: again[name] for name in timeless}
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_rank_without_memory_has_all_ranks_cut_the_micro_batch_and_the_step_is_the_same(two: dict[str, Any]) -> None:
    measured, expected = two["split"]["measured"], two["zero-1"]["measured"][0]
    assert expected["micro_batch_splits"] == 0.0
    assert measured["micro_batch_splits"] > 0.0
    assert measured["dropped_out_of_memory"] == 0.0
    assert measured["loss"] == pytest.approx(expected["loss"], abs=FORWARD)
    assert measured["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRADIENT)


def test_samples_that_do_not_fit_on_one_rank_are_left_out_and_all_ranks_know_how_many(two: dict[str, Any]) -> None:
    measured = two["left out"]["measured"]
    assert measured["dropped_out_of_memory"] == 3.0
    assert 0.0 < measured["grad_norm"] < float("inf")


def test_a_micro_batch_of_trees_is_cut_where_memory_lacks_and_the_step_is_the_same(two: dict[str, Any]) -> None:
    measured = two["episodes split"]["measured"]
    expected = on_one_rank(batch=test_tree_steps.episodes, **trainer_ranks.episodes())["measured"][0]
    assert (measured["micro_batch_splits"] > 0.0, measured["dropped_out_of_memory"]) == (True, 0.0)
    assert measured["loss"] == pytest.approx(expected["loss"], abs=FORWARD)
    assert measured["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRADIENT)


@pytest.mark.parametrize("scene", ["split", "left out", "episodes split"])
def test_a_replay_of_a_step_that_lacked_memory_on_one_rank_has_the_same_weights_to_the_bit(
    two: dict[str, Any], scene: str
) -> None:
    made, replayed = two[scene]["plans"]
    assert {misfit["ranks"] for misfit in made["misfits"]} == {(1,)}
    assert replayed == made
    for name, tensor in two[scene]["weights"].items():
        assert torch.equal(tensor, two[scene]["replayed"][name]), name


def test_a_folder_that_is_full_for_one_rank_leaves_the_checkpoint_before_and_the_next_one_is_whole(
    two: dict[str, Any],
) -> None:
    assert two["full"]["said"] == [("StepMade", True), ("StepMade", False), ("StepMade", True)]
    assert two["full"]["whole"] == [1, 3]
    assert two["full"]["left"] == ["step-000001", "step-000003"]


def test_tokens_of_a_group_are_recorded_whichever_rank_trained_them(two: dict[str, Any]) -> None:
    assert two["full"]["recorded"] == [2, 5, 3, 4]


def test_a_trainer_that_compiles_nothing_does_not_import_torchs_compiler(two: dict[str, Any]) -> None:
    assert two["compiler"] == []
